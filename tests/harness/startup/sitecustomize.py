"""Asks the kernel for AMX at the start of every process of a server under test; `Server` puts this on PYTHONPATH.

vLLM's CPU attention kernel uses AMX tiles, which Linux grants a process only on request. Nothing asks when an eager
server with an explicit KV size skips its warm-up: it dies with SIGILL at its first bfloat16 request. The plugin asks in
its general entry point; a reference server has no plugin, so this asks for all of them. The permission is inherited by
fork and lost by exec. A kernel or processor without AMX refuses the request, which then changes nothing.

`Server(..., grant_amx=False)` leaves this out, to see that the plugin asks by itself.
"""

import ctypes
import platform


def grant_amx() -> None:
    """arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) for this process, as torch.cpu._init_amx() does."""
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(158, 0x1023, 18)


grant_amx()
