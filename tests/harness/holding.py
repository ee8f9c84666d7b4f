"""A worker extension that takes its time: a catch-up does not end its reading while the file HOLD_FILE exists.

Servers of the harness import it by ``--worker-extension-cls holding.HoldingWorkerExtension``, since they are forked
from a process of this folder.
"""

import os
from pathlib import Path
from typing import Any

from vllm_nixl_plugin import NixlWorkerExtension


class HoldingWorkerExtension(NixlWorkerExtension):
    """See the module."""

    def nixl_push_rpc(self, request: dict[str, Any]) -> dict[str, Any]:
        """As ever, but that what has been read is told later."""
        answer = super().nixl_push_rpc(request)
        if request["action"] == "fetch" and answer["ok"] and Path(os.environ["HOLD_FILE"]).exists():
            answer["result"]["done"] = False
        return answer
