"""The places of a server's processes, put around the plugin's own functions before vLLM starts.

    worker.N.before.ACTION, worker.N.after.ACTION    an RPC of worker N: begin, prepare, install, finish, abort
    worker.N.installing                              half of the tensors of its model have their new values
    api.before.ACTION, api.after.ACTION              the same as the API process asks for it; also pause and resume

With FAULTS_DISK_FULL, folders for temporary files cannot be made. Processes that the harness forks leave the server's
port alone, as those that vLLM spawns do: it is closed when the API server dies.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
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
    os.register_at_fork(after_in_child=_leave_port)
    if os.environ.get("FAULTS_DISK_FULL"):
        tempfile.mkdtemp = _full  # type: ignore[assignment]


def _leave_port() -> None:
    port = int(sys.argv[sys.argv.index("--port") + 1])
    for fd in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - numbers are all that is needed
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
        except OSError:  # that of the listing itself
            continue
        with socket.socket(fileno=os.dup(fd)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == port:
                os.close(fd)


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
