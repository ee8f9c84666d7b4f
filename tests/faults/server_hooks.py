"""The places of a server's processes, put around the plugin's own functions before vLLM starts.

    worker.N.before.ACTION, worker.N.after.ACTION    an RPC of worker N: begin, prepare, install, finish, abort
    worker.N.installing                              half of the tensors of its model have their new values
    api.before.ACTION, api.after.ACTION              the same as the API process asks for it; also pause and resume

With FAULTS_DISK_FULL, folders for temporary files cannot be made.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from typing import Any, NoReturn

from faults.gate import arrive, arrive_async, shift_clock

_here = threading.local()


def install() -> None:
    """Wrap what the places are at. In the process from which a server forks the others."""
    import torch

    from vllm_nixl_plugin import pairing, worker
    from vllm_nixl_plugin.engine import Engine

    perform, apply = worker._perform, pairing.Change.apply

    def performed(session: Any, action: str, args: dict[str, Any]) -> Any:
        _here.worker = session.worker
        arrive(f"worker.{session.worker}.before.{action}")
        result = perform(session, action, args)
        arrive(f"worker.{session.worker}.after.{action}")
        return result

    def applied(self: Any) -> None:
        with torch.no_grad():
            for served, new in self.pours[: len(self.pours) // 2]:
                served.data.copy_(new)
        arrive(f"worker.{_here.worker}.installing")
        apply(self)

    worker._perform = performed
    pairing.Change.apply = applied
    for name in ("call_all", "pause", "resume"):
        setattr(Engine, name, _around(name, getattr(Engine, name)))
    shift_clock()
    if os.environ.get("FAULTS_DISK_FULL"):
        tempfile.mkdtemp = _full  # type: ignore[assignment]


def _full(*args: Any, **options: Any) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), options.get("dir"))


def _around(name: str, call: Any) -> Any:
    async def around(self: Any, *args: Any, **options: Any) -> Any:
        what = args[0] if name == "call_all" else name
        await arrive_async(f"api.before.{what}")
        result = await call(self, *args, **options)
        await arrive_async(f"api.after.{what}")
        return result

    return around
