"""Real vLLM servers for the tests, started and cleared away."""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from harness.launcher import kill_session, processes_of_session

HARNESS = Path(__file__).parent
TOKEN = "a-token-for-tests"
WORKER_EXTENSION = "vllm_nixl_plugin.NixlWorkerExtension"
_MARK = "HARNESS_SERVER_ID"


@dataclass(frozen=True)
class EngineOptions:
    """What decides the numbers that an engine produces. Servers that are compared must have the same."""

    eager: bool = True
    tensor_parallel: int = 1
    data_parallel: int = 1
    api_servers: int = 1
    dtype: str = "bfloat16"
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    launch: str = field(default_factory=lambda: os.environ.get("HARNESS_LAUNCH", "fork"))
    """"fork": from a process that has vLLM imported already (see launcher.py); "exec": as a user starts it."""

    def __post_init__(self) -> None:
        if self.launch not in ("fork", "exec"):
            raise ValueError(f"launch is 'fork' or 'exec', not {self.launch!r}")

    def with_(self, **changes: Any) -> Self:
        """The same options but for some."""
        return replace(self, **changes)

    @property
    def arguments(self) -> list[str]:
        """The arguments of `vllm serve`."""
        arguments = ["--dtype", self.dtype, "--max-model-len", "128", "--max-num-seqs", "4", "--seed", "0"]
        arguments += ["--kv-cache-memory-bytes", str(64 << 20)]
        arguments += ["--tensor-parallel-size", str(self.tensor_parallel)]
        arguments += ["--data-parallel-size", str(self.data_parallel), "--api-server-count", str(self.api_servers)]
        if self.eager:
            arguments.append("--enforce-eager")
        return arguments + list(self.args)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that these options need."""
        environment = {}
        if self.tensor_parallel * self.data_parallel > 1:
            # A core for each rank; by default vLLM wants a NUMA node for each.
            ranks = range(self.tensor_parallel * self.data_parallel)
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % (os.cpu_count() or 1)) for rank in ranks)
        if self.launch == "fork" and self.tensor_parallel == 1:
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker lives in the engine core
        if self.launch == "fork" and self.eager:
            # An eager engine compiles one function all the same, at its first request with logprobs: 3 s.
            environment["TORCH_COMPILE_DISABLE"] = "1"
        return environment | dict(self.env)


class Launcher:
    """The process from which servers are started; one for all servers of a test session. See launcher.py."""

    def __init__(self) -> None:
        answers, theirs = os.pipe()
        with contextlib.closing(os.fdopen(theirs, "w")):
            self._process = subprocess.Popen(
                [sys.executable, HARNESS / "launcher.py", str(theirs)],
                stdin=subprocess.PIPE,
                text=True,
                pass_fds=[theirs],
                env=_base_environment() | {"LD_PRELOAD": _preloads()},
            )
        self._answers = os.fdopen(answers)
        self._one_at_a_time = threading.Lock()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return its answer."""
        assert self._process.stdin
        with self._one_at_a_time:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._answers.readline()
        if not answer:
            raise RuntimeError(f"the launcher process ended with {self._process.wait(10)}; its output is above")
        return dict(json.loads(answer))

    def close(self) -> None:
        """End the launcher and every process that it started."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)
        self._answers.close()


_launcher: Launcher | None = None
_launching = threading.Lock()


def launcher() -> Launcher:
    """The launcher of this test session, started at first use."""
    global _launcher  # noqa: PLW0603 - one process, whichever fixture asks first
    with _launching:
        if _launcher is None:
            _launcher = Launcher()
        return _launcher


def close_launcher() -> None:
    """End the launcher of this test session, if there is one."""
    global _launcher  # noqa: PLW0603
    if _launcher is not None:
        _launcher.close()
        _launcher = None


class Server:
    """A vLLM server on a free loopback port.

        with Server(checkpoint) as server:
            completions(server.url, prompts)

    plugin: loads our plugin and the worker extension; without it, the server knows nothing of them.
    token: the server's PUSH_WEIGHTS_TOKEN.
    grant_amx: see startup/sitecustomize.py.
    args, env: more arguments and variables, which do not change the numbers.
    start_timeout_s: by when /health answers; stop_timeout_s: how long SIGTERM has before SIGKILL.

    The output goes to the file `log`; it is part of the message when the server does not start or dies, and pytest
    shows its end when a test fails (conftest.py). Leaving the context raises if a process of the server is left.
    """

    running: list["Server"] = []  # noqa: RUF012 - for conftest.py, which shows the logs of a failed test's servers

    def __init__(
        self,
        model: Path | str,
        options: EngineOptions | None = None,
        *,
        plugin: bool = True,
        token: str = TOKEN,
        grant_amx: bool = True,
        args: list[str] | None = None,
        env: dict[str, str] | None = None,
        log: Path | None = None,
        start_timeout_s: float = 240,
        stop_timeout_s: float = 20,
    ) -> None:
        self.model = str(model)
        self.options = options or EngineOptions()
        self.plugin = plugin
        self.token = token
        self.grant_amx = grant_amx
        self.args = args or []
        self.env = env or {}
        self.start_timeout_s = start_timeout_s
        self.stop_timeout_s = stop_timeout_s
        self.start_s = float("nan")
        """How long the start took."""
        self._id = uuid.uuid4().hex
        self.log = log or Path(tempfile.gettempdir()) / f"vllm-server-{self._id}.log"
        self._owns_log = log is None
        self.port = 0
        self.pid = 0

    @property
    def url(self) -> str:
        """http://127.0.0.1:port."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def command(self) -> list[str]:
        """What is run: `vllm serve`, spelt so that it needs no script on the PATH."""
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", self.model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "model"]
        command += self.options.arguments
        if self.plugin:
            command += ["--worker-extension-cls", WORKER_EXTENSION]
        return command + self.args

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment of the server."""
        environment = _base_environment() | self.options.environment
        environment |= {"VLLM_PLUGINS": "nixl" if self.plugin else "", _MARK: self._id}
        if self.plugin:
            environment["PUSH_WEIGHTS_TOKEN"] = self.token
        if self.grant_amx:
            environment["PYTHONPATH"] = str(HARNESS / "startup")
        return environment | self.env

    def start(self) -> Self:
        """Start the server and wait until /health answers."""
        self.port = self.port or _free_port()
        begin = time.monotonic()
        answer = launcher().ask(
            op="start", how=self.options.launch, command=self.command, env=self.environment, log=str(self.log)
        )
        self.pid = answer["pid"]
        if self not in self.running:
            self.running.append(self)
        try:
            self._wait_until_healthy(begin + self.start_timeout_s)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - begin
        return self

    def returncode(self) -> int | None:
        """The exit status of the server's first process, or None while it runs."""
        returncode: int | None = launcher().ask(op="poll", pid=self.pid)["returncode"]
        return returncode

    def processes(self) -> list[int]:
        """Every live process of the server: those of its session, and those that carry its mark."""
        marked = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and self._marked(entry)]
        return sorted({*marked, *processes_of_session(self.pid)})

    def kill(self) -> None:
        """SIGKILL to every process at once, as when a machine goes down. start() takes the same port again."""
        kill_session(self.pid)
        self._wait_until_gone(10)

    def stop(self) -> None:
        """End the server, and raise if something is left of it."""
        if self.returncode() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
        if left := self._wait_until_gone(self.stop_timeout_s):
            kill_session(self.pid)
        lost = self._wait_until_gone(10) if left else []
        if self in self.running:
            self.running.remove(self)
        for pid in lost:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if left:
            raise AssertionError(
                f"{len(left)} processes of the server outlived SIGTERM by {self.stop_timeout_s} s ({len(lost)} of them "
                f"outside its session) and were killed\n{self.log_tail()}"
            )
        if self._owns_log:
            self.log.unlink(missing_ok=True)

    def log_tail(self, lines: int = 80) -> str:
        """The end of the server's output."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"--- end of {self.log}\n" + "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(self.log_tail())
        self.stop()

    def _wait_until_healthy(self, deadline: float) -> None:
        with httpx.Client(timeout=5) as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{self.url}/health").status_code == 200:
                        return
                if (returncode := self.returncode()) is not None:
                    raise RuntimeError(f"the server ended with {returncode} while starting\n{self.log_tail()}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"/health did not answer in {self.start_timeout_s} s\n{self.log_tail()}")
                time.sleep(0.1)

    def _wait_until_gone(self, timeout_s: float) -> list[int]:
        """The processes that are left when all are gone or the time is over."""
        deadline = time.monotonic() + timeout_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.returncode()  # reaps the first process
        return left

    def _marked(self, entry: Path) -> bool:
        try:
            return f"{_MARK}={self._id}".encode() in (entry / "environ").read_bytes()
        except OSError:
            return False


@contextlib.contextmanager
def servers(*wanted: Server) -> Iterator[tuple[Server, ...]]:
    """Several servers at once, all cleared away at the end."""
    with contextlib.ExitStack() as stack:
        yield tuple(stack.enter_context(server) for server in wanted)


def _base_environment() -> dict[str, str]:
    """Our own environment without what would steer a server, and without any way out of this machine."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", "PUSH_WEIGHTS_", "PYTEST_", "COV_")) and name != "PYTHONPATH"
    }
    return environment | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _preloads() -> str:
    """The libraries that vLLM's CPU platform preloads into the engine cores that it spawns; forked ones have ours."""
    found = []
    for package, pattern in [("vllm", "libs/libtcmalloc_minimal*.so*"), ("torch", "lib/libgomp*.so*")]:
        spec = importlib.util.find_spec(package)
        if spec and spec.origin:
            found += [str(path) for path in Path(spec.origin).parent.glob(pattern)][:1]
    return ":".join(found)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
