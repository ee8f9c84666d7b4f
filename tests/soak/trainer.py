"""A trainer as a process of its own, which pushes what it is told to: killed, stopped and replaced by the soak.

    Trainer(...).do(what="push", letter="a", version="a1", ...)  ->  {"outcome": "ok", "servers": {url: code}, ...}

Its model is one set of tensors that live as long as it does, into which the weights of either checkpoint are written
before a push, as an optimizer does. Orders and answers are JSON lines (as a script, this module).
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
LEASE_S = 2.0
TIMEOUT_S = 60.0


class Trainer:
    """``checkpoints``: the folders of the weights, by letter. ``counts``: see counts.py."""

    def __init__(self, urls: list[str], token: str, checkpoints: Mapping[str, Path], counts: Path) -> None:
        given = {"urls": urls, "token": token, "checkpoints": {k: str(v) for k, v in checkpoints.items()}}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "soak.trainer", json.dumps(given)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=os.environ | {"PYTHONPATH": str(TESTS), "SOAK_COUNTS": str(counts), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def start(self, **order: Any) -> None:
        """Give an order."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = 300) -> dict[str, Any]:
        """What became of the order. Errors: RuntimeError when the process has died, TimeoutError."""
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"the trainer (PID {self.pid}) is still at it after {timeout_s:g} s") from None
        if not line:
            raise RuntimeError(f"the trainer (PID {self.pid}) has died")
        return dict(json.loads(line))

    def do(self, **order: Any) -> dict[str, Any]:
        """`start` and `answer`."""
        self.start(**order)
        return self.answer()

    def stop(self) -> None:
        """SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")


def main() -> None:
    """Follow orders until the end of stdin."""
    import torch

    from harness.checkpoints import read_weights
    from soak import counts
    from trainer_client import WeightClient
    from vllm_nixl_plugin.errors import PushFailed, PushWeightsError

    counts.install()
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    weights = {letter: read_weights(Path(path)) for letter, path in given["checkpoints"].items()}
    live = {name: tensor.clone() for name, tensor in weights["a"].items()}
    limits = {"timeout_s": TIMEOUT_S, "lease_s": LEASE_S, "progress": False}

    def made(token: str = given["token"]) -> WeightClient:
        return WeightClient(given["urls"], token=token, **limits)

    client = made()
    print(json.dumps({"outcome": "ready"}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        what, letter = order.pop("what"), order.pop("letter")
        for name, tensor in weights[letter].items():
            live[name].copy_(tensor)
        servers: dict[str, str] = {}
        outcome, message = "ok", ""
        try:
            if what == "push":
                report = client.push_weights(live, **order)
                servers = {each.server: each.error_code or "ok" for each in report.servers}
            elif what == "pairs":
                report = client.push_weights(((name, tensor.clone()) for name, tensor in live.items()), **order)
                servers = {each.server: each.error_code or "ok" for each in report.servers}
            elif what == "misshaped":
                name = "model.layers.0.self_attn.q_proj.weight"
                client.push_weights(live | {name: live[name].t().contiguous()[:, 1:]}, **order)
            elif what == "wrong token":
                with made("not-the-token-of-this-server") as stranger:
                    stranger.push_weights(live, **order)
            elif what == "cancelled":
                other = made()
                handle = other.push_weights_async(live, **order)
                time.sleep(order.get("after_s", 0.05))
                other.close(cancel=True)
                handle.wait()
        except PushFailed as error:
            outcome, message = "failed", str(error)
            servers = {each.server: each.error_code or "ok" for each in error.report.servers}
        except PushWeightsError as error:
            outcome, message = error.code, str(error)
        print(json.dumps({"outcome": outcome, "message": message, "servers": servers}), flush=True)


if __name__ == "__main__":
    main()
