"""Runs the suite: one process imports vLLM once and forks a child per checkpoint and engine; one at a time."""

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_PLUGINS": "",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # the machine is shared, and layers this small gain nothing
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc takes functions then
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


@dataclass
class Row:
    """What was found for one model."""

    model: str
    layout: str
    mode: str
    result: str = ""
    seconds: float = 0.0
    details: list[str] = field(default_factory=list)
    live: int = 0
    shadow: int = 0
    fallback: int = 0
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return self.result == "equal"


class ChildFailed(Exception):
    """``reason``: the last line of the child's traceback; ``log``: all that it said."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(reason)
        self.log = log


def prepare() -> None:
    """Import what the children need; nothing here may start a thread."""
    os.environ |= ENVIRONMENT
    import torch

    torch.cpu._init_amx()
    from fidelity.vision import provide

    provide()
    from harness.launcher import fork_instead_of_spawn, import_vllm

    import_vllm()
    import vllm

    import harness.checkpoints  # noqa: F401
    import vllm_nixl_plugin.fingerprint
    import vllm_nixl_plugin.plane  # noqa: F401

    _ = vllm.LLM
    fork_instead_of_spawn()


def run(
    names: list[str], *, compiled: bool = False, tp: int = 1, keep: Path | None = None, timeout_s: float = 300
) -> Iterator[Row]:
    for name in names:
        with tempfile.TemporaryDirectory(prefix="fidelity-") as folder:
            yield _one(name, compiled, tp, Path(folder), timeout_s, keep)


def _one(name: str, compiled: bool, tp: int, folder: Path, timeout_s: float, keep: Path | None) -> Row:
    from fidelity.models import MODELS

    spec = MODELS[name]
    row = Row(name, f"tp{tp}", "compiled" if compiled else "eager")
    args = spec.args | ({"enforce_eager": False} if compiled else {})
    args |= {"tensor_parallel_size": tp} if tp > 1 else {}
    begin = time.monotonic()

    def child(function: str, *arguments: Any) -> Any:
        return in_child(lambda: _call(function, *arguments), folder, timeout_s)

    a, b = folder / "a", folder / "b"
    stage = "writing the checkpoint"
    try:
        child("write", {str(a): 1, str(b): 2}, name)
        stage = "a fresh engine"
        want = {path: child("fresh", path, spec.runner, args) for path in (a, b)}
        stage = "the push"
        got = child("pushed", a, [b, a, b], spec.runner, args)
        steps = got.pop("steps")
        row.report = got
        row.live, row.shadow = got["homes"].get("live", 0), got["homes"].get("shadow", 0)
        row.fallback = got["homes"].get("source", 0)
        found = _compare(want, steps, (a, b, a, b))
        if found:
            again = child("fresh", b, spec.runner, args)
            found += [f"FRESH DIFFERS FROM FRESH: {line}" for line in _differ(want[b], again)]
        row.details = found
        row.result = "equal" if not found else "DIFFERENT"
        if not found and want[a]["outputs"] == want[b]["outputs"]:
            row.result = "blind: both checkpoints give the same"
    except ChildFailed as failure:
        row.result = f"not run: {stage}: {failure}" if stage != "the push" else f"FAILED: {failure}"
        row.details = failure.log.splitlines()[-60:]
    row.seconds = time.monotonic() - begin
    if keep and not row.equal:
        shutil.copytree(folder, keep / name, dirs_exist_ok=True)
    return row


def _compare(want: dict[Path, Any], steps: list[Any], order: tuple[Path, ...]) -> list[str]:
    return [
        f"after push {number}: {line}"
        for number, (step, path) in enumerate(zip(steps, order, strict=True))
        for line in _differ(step, want[path])
    ]


def _differ(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    from vllm_nixl_plugin.fingerprint import differences

    lines = []
    if a["outputs"] != b["outputs"]:
        lines.append(f"outputs differ: {str(a['outputs'])[:80]} | {str(b['outputs'])[:80]}")
    return lines + differences(a["fingerprint"], b["fingerprint"])


def _call(function: str, *arguments: Any) -> Any:
    from fidelity import engine, models

    if function == "write":
        return models.write_checkpoints(*arguments)
    return getattr(engine, function)(*arguments)


def in_child(function: Callable[[], Any], folder: Path, timeout_s: float) -> Any:
    """The function's result, from a forked process with a session of its own. Errors: ChildFailed."""
    from harness.launcher import kill_session

    answer, log = folder / "answer.json", folder / "log"
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        _be_child(function, answer, log)
    deadline = time.monotonic() + timeout_s
    status = None
    while status is None and time.monotonic() < deadline:
        done, found = os.waitpid(pid, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(found)
        else:
            time.sleep(0.02)
    kill_session(pid)
    if status is None:
        os.waitpid(pid, 0)
    text = log.read_text(errors="replace")
    if status == 0 and answer.exists():
        return json.loads(answer.read_text())
    lines = [line for line in text.splitlines() if re.match(r"[\w.]*(Error|Exception|Refused|Failed|Restart)\b", line)]
    if status is None:
        reason = f"did not end in {timeout_s:.0f} s"
    elif status < 0:
        reason = f"died of {signal.Signals(-status).name}"
    else:
        reason = lines[-1] if lines else f"ended with {status}"
    raise ChildFailed(reason[:300], text)


def _be_child(function: Callable[[], Any], answer: Path, log: Path) -> None:
    status = 1
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        answer.write_text(json.dumps(function()))
        status = 0
    except BaseException:  # noqa: BLE001 - the log is the only place to tell
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def as_dict(row: Row) -> dict[str, Any]:
    return asdict(row)
