"""A worker extension with a fault: it flips a bit of what has arrived, before the worker looks at it.

While the file that FLIP_FILE names exists, in the destination that its text names. Servers of the harness import it by
``--worker-extension-cls flipping.FlippingWorkerExtension``, since they are forked from a process of this folder.
"""

import os
from pathlib import Path
from typing import Any

from vllm_nixl_plugin import NixlWorkerExtension


class FlippingWorkerExtension(NixlWorkerExtension):
    """See the module."""

    def nixl_push_rpc(self, request: dict[str, Any]) -> dict[str, Any]:
        """As without the fault, but for updates that are about to be verified."""
        file = Path(os.environ["FLIP_FILE"])
        if request["action"] == "verify" and "sums" in request["args"] and file.exists():
            plane, update = self._nixl_push_session.plane, self._nixl_push_session.update  # type: ignore[attr-defined]
            homes = plane.binder.homes(plane._of(update.plan), update.mode)
            wanted = file.read_text()
            [index] = [i for i, d in enumerate(update.plan.destinations) if wanted in d.names]
            homes[index][homes[index].numel() // 2] ^= 8
        return super().nixl_push_rpc(request)
