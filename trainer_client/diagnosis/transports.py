"""NIXL's plug-ins, and real writes between two processes: from host memory, and on each GPU; the bytes are compared.

UCX says itself which transport it took (UCX_PROTO_INFO); on the host it is also asked to use TCP alone. `probe` has the
two sides.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainer_client.diagnosis.finding import Finding, Level
from trainer_client.diagnosis.probe import MARK
from trainer_client.report import format_nbytes
from vllm_nixl_plugin.agent import load_nixl
from vllm_nixl_plugin.errors import FabricError

NBYTES = 256 << 20
TIMEOUT_S = 120.0
TAKEN = re.compile(
    r"(?:intra|inter)-node[^\n]*\n[^\n]*remote memory write by ucp_put[^\n]*\n"
    r"(?:[^\n]*\n)*?[^\n]*\.\.inf +\|[^|\n]*\| ([^|\n]*?) +\|"
)
"""In what UCX prints: the transport of large writes to another process, such as ``cma/memory``. The last one counts."""
SECTION = "transports"
SLOW_GPU = 4e9
"""Bytes per second that GPUs of one host reach directly, over PCIe at the least, and not by a way through the host."""
DETOUR = "leave UCX_TLS and expandable segments alone; one container for both sides, or --ipc=host --pid=host"
REMEDY = "run it with UCX_LOG_LEVEL=info, and leave UCX_TLS unset"


def transports(n_gpus: int, nbytes: int = NBYTES, interfaces: Sequence[str] | None = None) -> Iterator[Finding]:
    """Everything of this module; a second or two for each line."""
    try:
        yield Finding(SECTION, "NIXL plug-ins", ", ".join(sorted(plugins())))
    except FabricError as error:
        yield Finding(SECTION, "NIXL plug-ins", error.message, Level.BAD, "pip install nixl")
        return
    yield measured("host memory", ("host", "host"), nbytes, {}, interfaces)
    if "UCX_TLS" not in os.environ:
        alone = "tcp,self,cuda_copy" if n_gpus else "tcp,self"  # NIXL wants to know CUDA memory where there is some
        yield measured("host memory, TCP alone", ("host", "host"), nbytes, {"UCX_TLS": alone}, interfaces)
    for index in range(n_gpus):
        yield measured(f"GPU {index}", (str(index), str(index)), nbytes, {}, interfaces)
    for index in range(n_gpus - 1):
        places = (str(index), str(index + 1))
        yield measured(f"GPU {index} to GPU {index + 1}", places, nbytes, {}, interfaces)


def plugins() -> list[str]:
    """The plug-ins that NIXL finds. Errors: FabricError."""
    bindings = load_nixl()
    agent = bindings.nixlAgent("vllm-nixl-doctor", bindings.nixlAgentConfig())
    return [str(name) for name in agent.getAvailPlugins()]


def measured(
    what: str,
    places: tuple[str, str],
    nbytes: int,
    variables: Mapping[str, str],
    interfaces: Sequence[str] | None = None,
) -> Finding:
    """A write of ``nbytes`` from a place to another (``host``, or a GPU's number), two processes, with these variables.

    One that does not work is bad, but not where a single transport was asked for.
    """
    try:
        seconds, copy_s, taken = _write(places, nbytes, variables, interfaces)
    except ProbeFailed as error:
        level, remedy = (Level.NOTE, "") if variables else (Level.BAD, REMEDY)
        return Finding(SECTION, what, f"does not work: {error}", level, remedy)
    rate, of = nbytes / seconds, nbytes / copy_s
    by = taken or "an unknown transport"
    compared = f"{rate / of:.2f} of a copy within one process ({format_nbytes(int(of))}/s)"
    told = f"{format_nbytes(int(rate))}/s by {by}, {compared}"
    if "host" not in places and rate < SLOW_GPU:
        return Finding(SECTION, what, f"{told}: through the host", Level.WARNING, DETOUR)
    return Finding(SECTION, what, told)


class ProbeFailed(Exception):
    """One of the two processes did not do its part; the last line of its errors."""


def _write(
    places: tuple[str, str], nbytes: int, variables: Mapping[str, str], interfaces: Sequence[str] | None
) -> tuple[float, float, str]:
    """Seconds of the best write and of the best copy, and the transport. Errors: ProbeFailed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ucx"
        said = {"PROBE_INTERFACES": ",".join(interfaces or ()), "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": f"{log}-%p"}
        seconds, copy_s = _timed(places, nbytes, {**os.environ, **variables, **said})
        printed = "\n".join(each.read_text("utf-8", "replace") for each in sorted(Path(folder).iterdir()))
    return seconds, copy_s, next(reversed(TAKEN.findall(printed)), "")


def _timed(places: tuple[str, str], nbytes: int, environment: Mapping[str, str]) -> tuple[float, float]:
    """Start both sides and end them. Errors: ProbeFailed."""
    sides = [
        subprocess.Popen(
            [sys.executable, "-m", "trainer_client.diagnosis.probe", role, memory, str(nbytes)], env=environment,
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) for role, memory in (("target", places[1]), ("source", places[0]))
    ]  # fmt: skip
    timer = threading.Timer(TIMEOUT_S, _end, [sides])
    timer.start()
    try:
        target, source = sides
        result = json.loads(_line(source, _line(target)).removeprefix(MARK))
        if not json.loads(_line(target, "look\n").removeprefix(MARK))["equal"]:
            raise ProbeFailed("the write ended, and the bytes are not there")
        source.wait(TIMEOUT_S)  # what UCX prints is in a file when it ends
        return result["seconds"], result["copy_s"]
    finally:
        timer.cancel()
        _end(sides)
        for side in sides:
            side.communicate()


def _end(sides: Sequence[subprocess.Popen[str]]) -> None:
    for side in sides:
        side.kill()


def _line(side: subprocess.Popen[str], say: str = "") -> str:
    """Say something to a process and hear its line, past what others write. Errors: ProbeFailed."""
    assert side.stdin
    assert side.stdout
    assert side.stderr
    with contextlib.suppress(BrokenPipeError):
        side.stdin.write(say)
        side.stdin.flush()
    heard: list[str] = []
    for line in side.stdout:
        if line.startswith(MARK):
            return line
        heard.append(line.strip())
    told = [each for each in (*heard, *side.stderr.read().splitlines()) if each.strip()]
    raise ProbeFailed(told[-1] if told else f"ended with {side.wait()} within {TIMEOUT_S:.0f} s")
