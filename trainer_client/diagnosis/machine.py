"""The machine: what memory can be registered, which namespaces this is in, GPUs, network devices, and who is near whom.

Read from /proc and /sys; paths can be given, so that tests can show other machines.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer_client.diagnosis.finding import Finding, Level
from trainer_client.report import format_nbytes

SMALL_SHM = 1 << 30
HOST_NAMESPACES = {"ipc": "ipc:[4026531839]", "pid": "pid:[4026531836]"}
"""The first namespaces of a Linux kernel have fixed numbers."""


@dataclass(frozen=True)
class Device:
    """A GPU or a network device. ``path``: in /sys, its place on the PCI buses; None for one without (lo, a bridge)."""

    name: str
    about: str
    path: Path | None
    numa: int | None


def machine(gpus: Sequence[Device], root: Path = Path("/")) -> Iterator[Finding]:
    """Everything of this module."""
    nics = [*infiniband(root), *network(root)]
    yield from memory(root, rdma=any(nic.name.count(":") for nic in nics))
    yield from namespaces(root)
    yield from _devices("GPUs", gpus, "none: this process sees no CUDA device")
    yield from _devices(
        "RDMA devices", list(infiniband(root)), "none (nothing in /sys/class/infiniband): data goes over TCP"
    )
    yield from _devices("network devices", list(network(root)), "none")
    for gpu in gpus:
        near = {nic.name: distance(gpu, nic) for nic in nics if nic.path is not None}
        if near:
            told = ", ".join(f"{name}: {far}" for name, far in near.items())
            yield Finding("devices", f"from {gpu.name}", told)


def memory(root: Path, *, rdma: bool) -> Iterator[Finding]:
    """Locked memory, huge pages, ptrace, shared memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("memory", "locked memory (ulimit -l)", "unlimited")
    else:
        yield Finding(
            "memory", "locked memory (ulimit -l)", format_nbytes(soft), Level.BAD if rdma else Level.NOTE,
            "RDMA devices need `ulimit -l unlimited` (containers: --ulimit memlock=-1)",
        )  # fmt: skip
    pages = {
        line.split(":")[0]: line.split()[1]
        for line in _read(root / "proc/meminfo").splitlines()
        if line.startswith("HugePages_")
    }
    transparent = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = transparent[transparent.find("[") + 1 : transparent.find("]")] if "[" in transparent else "unknown"
    yield Finding("memory", "huge pages", f"{pages.get('HugePages_Total', '0')} reserved, transparent: {chosen}")
    scope = _read(root / "proc/sys/kernel/yama/ptrace_scope")
    if scope in ("", "0"):
        yield Finding(
            "memory", "one process may read another's (ptrace_scope)", scope or "no Yama: as far as users are equal"
        )
    else:
        yield Finding(
            "memory", "one process may read another's (ptrace_scope)", scope, Level.NOTE,
            "between processes of this host UCX copies twice, through shared memory; once (CMA), with "
            "kernel.yama.ptrace_scope=0 or --cap-add SYS_PTRACE",
        )  # fmt: skip
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError as error:
        yield Finding("memory", "/dev/shm", f"cannot be used: {error}", Level.BAD, "mount a tmpfs there")
        return
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    small = size < SMALL_SHM
    yield Finding(
        "memory", "/dev/shm", f"{format_nbytes(size)}, {format_nbytes(free)} free",
        Level.WARNING if small else Level.OK,
        "vLLM's processes and UCX talk through it: --shm-size 8g, or --ipc=host" if small else "",
    )  # fmt: skip


def namespaces(root: Path) -> Iterator[Finding]:
    """Whether shared memory and CUDA IPC reach processes outside of this container."""
    inside = [name for name in (".dockerenv", "run/.containerenv") if (root / name).exists()]
    own = []
    for kind, host in HOST_NAMESPACES.items():
        try:
            if str((root / "proc/self/ns" / kind).readlink()) != host:
                own.append(kind)
        except OSError:
            continue
    if own:
        yield Finding(
            "memory", "namespaces", f"{' and '.join(own)} of this container, not of the host", Level.NOTE,
            "trainer and server in one container are fine; else --ipc=host --pid=host for both, or an interface",
        )  # fmt: skip
    else:
        yield Finding("memory", "namespaces", "those of the host" + (", in a container" if inside else ""))


def gpus(root: Path = Path("/")) -> list[Device]:
    """The CUDA devices that this process sees."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        parts = [getattr(about, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]  # not in every torch
        bus = "" if None in parts else "{:04x}:{:02x}:{:02x}.0".format(*(part or 0 for part in parts))
        path = (root / "sys/bus/pci/devices" / bus).resolve() if bus else root / "nowhere"
        peers = [
            str(o)
            for o in range(torch.cuda.device_count())
            if o != index and torch.cuda.can_device_access_peer(index, o)
        ]
        reach = f", reaches GPUs {', '.join(peers)} directly" if peers else ""
        told = f"{about.name}, {format_nbytes(about.total_memory)}, PCI {bus or 'unknown'}{reach}"
        found.append(Device(f"GPU {index}", told, path if path.exists() else None, _numa(path)))
    return found


def infiniband(root: Path = Path("/")) -> Iterator[Device]:
    """Ports of RDMA devices, named as ``interfaces`` takes them: ``mlx5_0:1``."""
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device = port.parents[1]
        about = [_read(port / name) for name in ("link_layer", "state", "rate")]
        yield Device(f"{device.name}:{port.name}", ", ".join(filter(None, about)), *_place(device))


def network(root: Path = Path("/")) -> Iterator[Device]:
    """Network interfaces, virtual ones too."""
    for device in sorted((root / "sys/class/net").glob("*")):
        if not device.is_dir():
            continue
        speed = _read(device / "speed")
        told = [_read(device / "operstate"), f"{speed} Mb/s" if speed.isdecimal() else ""]
        yield Device(device.name, ", ".join(filter(None, told)) or "unknown", *_place(device))


def distance(one: Device, other: Device) -> str:
    """How far two PCI devices are from each other."""
    if one.path is None or other.path is None:
        return "unknown"
    common = [a for a, b in zip(one.path.parts, other.path.parts, strict=False) if a == b]
    bridges = [part for part in common if part.count(":") == 2]
    if bridges:
        return "same switch"
    if any(part.startswith("pci") for part in common):
        return "same root"
    if one.numa is not None and one.numa == other.numa:
        return "same NUMA node"
    return "other NUMA node" if None not in (one.numa, other.numa) else "other root"


def _devices(what: str, devices: Sequence[Device], none: str) -> Iterator[Finding]:
    if not devices:
        yield Finding("devices", what, none, Level.NOTE)
    for device in devices:
        yield Finding(
            "devices", device.name, device.about + (f", NUMA node {device.numa}" if device.numa is not None else "")
        )


def _place(device: Path) -> tuple[Path | None, int | None]:
    path = (device / "device").resolve() if (device / "device").exists() else None
    return path, _numa(path) if path else None


def _numa(path: Path) -> int | None:
    told = _read(path / "numa_node")
    return int(told) if told.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
