"""Starts server processes for the tests, and takes them along when the tests die. Run as a script by `Launcher`.

Importing vLLM costs 7-10 s of processor time, in every process of every server. So this process imports it once, at the
first request, and forks a child per server; that child runs vLLM's own `main`, and forks its engine cores and workers.
Measured on two cores: 2 s a start instead of 21 s, 3 s instead of 28 s with two tensor-parallel ranks.

Requests are JSON lines on stdin, answers JSON lines on the descriptor given as the only argument:

    {"op": "start", "how": "fork" | "exec", "command": [...], "env": {...}, "log": path}  ->  {"pid": n}
    {"op": "poll", "pid": n}                                     ->  {"returncode": n | null}

A started process leads a session of its own. At the end of stdin every process of those sessions is killed.
"""

import gc
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path


def processes_of_session(session: int) -> list[int]:
    """The live processes of a session, zombies not counted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _parent, _group, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(its_session) == session and state not in "ZX":
                found.append(int(entry.name))
    return found


def kill_session(session: int) -> None:
    """SIGKILL to every process of a session, until none is left."""
    while pids := processes_of_session(session):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def import_vllm() -> None:
    """Import what a CPU server imports anyway, and nothing that starts a thread."""
    import torch._inductor.codecache
    import torch._inductor.compile_fx
    import torch._inductor.cpu_vec_isa
    import vllm.entrypoints.cli.benchmark.main
    import vllm.entrypoints.cli.collect_env
    import vllm.entrypoints.cli.launch
    import vllm.entrypoints.cli.openai
    import vllm.entrypoints.cli.run_batch
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.launchers.api_server.entry
    import vllm.model_executor.models.deepseek_v2
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.mamba2
    import vllm.model_executor.models.qwen3_moe
    import vllm.v1.engine.coordinator
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    # What a process finds out once before its first compilation, by hashing torch's sources and by a trial run of g++.
    torch._inductor.codecache.torch_key()
    torch._inductor.codecache.CacheBase.get_system()
    torch._inductor.cpu_vec_isa.pick_vec_isa()
    gc.collect()
    gc.freeze()  # children copy fewer pages


def fork_instead_of_spawn() -> None:
    """Let this process fork where vLLM starts another Python, which would import everything again.

    The CPU platform sets the start method of engine cores and workers to spawn whatever the environment says; the class
    of a model is looked at in a subprocess, at its first use on a machine, only to keep CUDA out of this one.
    """
    import multiprocessing

    import torch._dynamo
    import vllm.model_executor.models.registry
    from vllm.v1.executor.multiproc_executor import WorkerProc

    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and "get_mp_context" in vars(module):
            module.get_mp_context = lambda: multiprocessing.get_context("fork")
    vllm.model_executor.models.registry._run_in_subprocess = lambda look: look()
    torch._dynamo.config.disable = os.environ.get("TORCH_COMPILE_DISABLE") == "1"  # read when torch was imported

    worker_main = WorkerProc.worker_main

    def bound_worker_main(*args: object, **kwargs: object) -> None:
        """What the OpenMP library of a spawned worker does while it is loaded."""
        if cpus := os.environ.get("GOMP_CPU_AFFINITY"):
            os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split()])
            torch.set_num_threads(len(cpus.split()))
        worker_main(*args, **kwargs)

    WorkerProc.worker_main = staticmethod(bound_worker_main)


def run_child(request: dict) -> None:
    """Become the server. Does not return."""
    status = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.closerange(3, 256)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)
        command = request["command"]
        if request["how"] == "exec":
            os.execve(command[0], command, request["env"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv = command[2:]
        for folder in filter(None, os.environ.get("PYTHONPATH", "").split(":")):
            runpy.run_path(f"{folder}/sitecustomize.py")  # as a new interpreter would
        fork_instead_of_spawn()
        runpy.run_module(command[2], run_name="__main__", alter_sys=False)
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 - the log is the only place to tell
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Serve requests until the end of stdin."""
    answers = os.fdopen(int(sys.argv[1]), "w")
    started, returncodes, imported = [], {}, False
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "start":
            if request["how"] == "fork" and not imported:
                import_vllm()
                imported = True
            pid = os.fork()
            if pid == 0:
                run_child(request)
            returncodes.pop(pid, None)  # of an earlier server that had the same number
            started.append(pid)
            answer = {"pid": pid}
        else:
            pid = request["pid"]
            if pid not in returncodes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    returncodes[pid] = os.waitstatus_to_exitcode(status)
                    if not processes_of_session(pid):
                        started.remove(pid)  # the number may come back as somebody else's session
            answer = {"returncode": returncodes.get(pid)}
        print(json.dumps(answer), file=answers, flush=True)
    for pid in started:
        kill_session(pid)
    os._exit(0)  # an orderly end makes Triton's bindings complain about leaks


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to pytest, which then closes our stdin
    main()
