"""Names of processes, so that a server can tell whether those of its own host that may write to it still exist.

A trainer's processes name themselves (`this_process`) when they begin an update; a worker asks by name (`is_running`).
Linux only: elsewhere every name is unknown.
"""

from __future__ import annotations

import os
from pathlib import Path


def this_process() -> str:
    """Names this process among all of this host, past and present: host boot, PID namespace, PID, start time."""
    pid = os.getpid()
    return f"{_host()}/{pid}@{_started(pid)}"


def is_running(process: str) -> bool:
    """Whether the process of this name runs (or is stopped) on this host; False for those of other hosts."""
    host, _, name = process.rpartition("/")
    pid, _, started = name.partition("@")
    return bool(started) and host == _host() and pid.isdecimal() and _started(int(pid)) == started


def is_gone(process: str) -> bool:
    """Whether the process of this name cannot be on this machine any more: it is dead, or of another machine. Those of
    another PID namespace of this machine cannot be seen."""
    host = process.rpartition("/")[0]
    if host == _host():
        return not is_running(process)
    return bool(host and _host()) and host.partition(" ")[0] != _host().partition(" ")[0]


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When the process started, in clock ticks; empty when it is gone, or dead and not yet reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
