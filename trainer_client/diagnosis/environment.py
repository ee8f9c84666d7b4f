"""Settings that are set here, and variables of others that are known to go wrong with this."""

from __future__ import annotations

import os
from collections.abc import Iterator

from trainer_client.diagnosis.finding import Finding, Level
from vllm_nixl_plugin import settings
from vllm_nixl_plugin.settings import PREFIX, ServerSettings, TrainerSettings

WIRED = {
    "all", "tcp", "ib", "rc", "rc_x", "rc_v", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5", "ud", "ud_x", "ud_v",
    "ud_verbs", "ud_mlx5", "srd",
}  # fmt: skip
"""Names in UCX_TLS that NIXL's UCX can connect by; shared memory and CUDA alone are not enough."""
SHARED = {"all", "sm", "shm", "mm", "posix", "sysv", "xpmem", "cma"}
CUDA = {"all", "cuda", "cuda_ipc"}
SECRET = {"PUSH_WEIGHTS_TOKEN"}


def environment(*, has_gpu: bool) -> Iterator[Finding]:
    """Everything of this module. ``has_gpu``: whether a GPU is in use here."""
    yield from _settings()
    yield from _ucx(has_gpu=has_gpu)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            yield Finding(
                "environment", name, os.environ[name], Level.BAD if has_gpu else Level.WARNING,
                "NIXL cannot register memory of expandable segments, or writes it slowly, through the host: unset it",
            )  # fmt: skip
    if os.environ.get("VLLM_SERVER_DEV_MODE", "0") == "1":
        yield Finding(
            "environment", "VLLM_SERVER_DEV_MODE", "1: routes such as /collective_rpc need no token", Level.WARNING,
            "--middleware vllm_nixl_plugin.guard.Guard, or unset it",
        )  # fmt: skip
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        yield Finding(
            "environment", "VLLM_USE_RUST_FRONTEND", os.environ["VLLM_USE_RUST_FRONTEND"], Level.BAD,
            "vLLM's Rust front end loads no plugins: unset it for a server",
        )  # fmt: skip


def _settings() -> Iterator[Finding]:
    for name in sorted(name for name in os.environ if name.upper() in settings.known()):
        yield Finding("settings", name, "(secret)" if name.upper() in SECRET else repr(os.environ[name]))
    told = list(dict.fromkeys(settings.problems(ServerSettings) + settings.problems(TrainerSettings)))
    for problem in told:
        yield Finding("settings", problem.split(" ")[0], problem, Level.BAD, "see docs/configuration.md")
    if not told:
        yield from _token()


def _token() -> Iterator[Finding]:
    try:
        settings.check_token()
    except settings.MissingToken:
        yield Finding(
            "settings", f"{PREFIX}TOKEN", "no token here: a server would not start, a client would be refused",
            Level.WARNING,
            f"{PREFIX}TOKEN, or {PREFIX}TOKEN_FILE with a file that can be read",
        )  # fmt: skip


def _ucx(*, has_gpu: bool) -> Iterator[Finding]:
    given = os.environ.get("UCX_TLS")
    names = {name.strip().lstrip("\\").split(":")[0] for name in (given or "").split(",") if name.strip()}
    if given and not given.startswith("^"):
        if not names & WIRED:
            yield Finding(
                "environment", "UCX_TLS", f"{given}: NIXL cannot connect by these alone", Level.BAD,
                "leave UCX_TLS unset (NIXL_ERR_BACKEND otherwise)",
            )  # fmt: skip
        elif not names & SHARED:
            yield Finding("environment", "UCX_TLS", f"{given}: no shared memory", Level.WARNING, "leave UCX_TLS unset")
        if has_gpu and not names & CUDA:
            yield Finding(
                "environment", "UCX_TLS", f"{given}: no cuda, which NIXL needs where there are GPUs", Level.BAD,
                "leave UCX_TLS unset, or add cuda (NIXL_ERR_BACKEND otherwise)",
            )  # fmt: skip
    elif given:
        hidden = sorted({name.lstrip("^") for name in names} & (SHARED | CUDA))
        level = Level.WARNING if hidden else Level.NOTE
        yield Finding("environment", "UCX_TLS", f"{given}: leaves transports out", level, "leave UCX_TLS unset")
    if devices := os.environ.get("UCX_NET_DEVICES"):
        yield Finding(
            "environment", "UCX_NET_DEVICES", f"{devices}: has no effect here", Level.NOTE,
            f"name devices by {PREFIX}INTERFACES, on both sides",
        )  # fmt: skip
