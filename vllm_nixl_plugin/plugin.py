"""What vLLM's plugin system calls: `register` in every process, `EndpointPlugin` in the API server.

Both entry points carry the name ``nixl``, because ``VLLM_PLUGINS`` filters all groups by one list.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.nixl_plugin")

EXTENSION = "vllm_nixl_plugin.NixlWorkerExtension"
GUARD = "vllm_nixl_plugin.guard.Guard"


@cache
def register() -> None:
    """Entry point of ``vllm.general_plugins``: in every process, possibly more than once; no device work.

    Errors: MissingToken and InvalidSettings, which end the start of a server.
    """
    _refuse_early()
    _allow_amx()
    # The loader hook: records each model's state at creation, before its weights are loaded.
    from vllm_nixl_plugin.model import install_hook

    install_hook()


class EndpointPlugin:
    """Entry point of ``vllm.endpoint_plugins``. Not for the render server, which has no engine."""

    name = "nixl"
    required_tasks = (
        "generate", "transcription", "realtime",
        "embed", "classify", "token_embed", "token_classify", "plugin", "embed&token_classify",
    )  # fmt: skip

    def attach_router(self, app: Any) -> None:
        """Called while vLLM builds its app."""
        from vllm_nixl_plugin import api, settings
        from vllm_nixl_plugin.versions import Versions

        app.add_middleware(Versions)
        if settings.address() is None:
            api.attach(app)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Errors end the start of the server: MissingToken, InvalidSettings, RuntimeError without the extension."""
        from vllm_nixl_plugin import api, settings
        from vllm_nixl_plugin.engine import Engine
        from vllm_nixl_plugin.metrics import Observer
        from vllm_nixl_plugin.updates import Updates
        from vllm_nixl_plugin.wire import PREFIX

        if engine_client is None:
            return
        settings.check_startup()
        check_extension(engine_client, args)
        warn_of_open_routes(args)
        updates = Updates(Engine(engine_client, alone=(getattr(args, "api_server_count", None) or 1) == 1))
        await api.start(state, updates)
        Observer(updates).start()
        address = settings.address()
        if address is not None:
            from vllm_nixl_plugin.listener import listen

            await listen(api.app_for(updates), address, args)
        logger.info("weight updates are served below %s%s", PREFIX, f" on {address[0]}:{address[1]}" if address else "")


def check_extension(engine_client: Any, args: Any) -> None:
    """Asking workers that lack the method would put their answers out of step for good, so look first.

    Errors: RuntimeError.
    """
    from vllm_nixl_plugin.engine import RPC

    config = getattr(getattr(engine_client, "vllm_config", None), "parallel_config", None)
    given = getattr(config, "worker_extension_cls", None) or getattr(args, "worker_extension_cls", None) or ""
    module, _, name = (given if isinstance(given, str) else "").rpartition(".")
    cls = getattr(import_module(module), name, None) if module else None
    if not callable(getattr(cls, RPC, None)):
        raise RuntimeError(f"weight updates need --worker-extension-cls {EXTENSION} (it is {given!r})")


def warn_of_open_routes(args: Any) -> None:
    """With its development routes, vLLM lets everybody call any method of the workers, ours too."""
    if os.environ.get("VLLM_SERVER_DEV_MODE", "0") == "1" and GUARD not in (getattr(args, "middleware", None) or ()):
        logger.warning(
            "VLLM_SERVER_DEV_MODE=1 opens routes such as /collective_rpc to everybody who reaches this server, without "
            "any token: add --middleware %s, or keep others away", GUARD,
        )  # fmt: skip


def _refuse_early() -> None:
    """vLLM starts our routes when the model is loaded. A server that could not start them is told before that."""
    script = Path(sys.argv[0]).name
    command = script in ("vllm", "main.py") or script.startswith("vllm.")  # by its script, or as a module
    serves = script == "api_server.py" or (command and sys.argv[1:2] == ["serve"])
    if serves and "--headless" not in sys.argv and "nixl" in os.environ.get("VLLM_PLUGINS", "").split(","):
        from vllm_nixl_plugin import settings

        settings.check(settings.ServerSettings)
        settings.check_token()


def _allow_amx() -> None:
    """Ask the kernel for AMX tiles. vLLM's CPU kernels use them, but an eager server never asks and dies of SIGILL."""
    try:
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            import torch

            torch.cpu._init_amx()
    except Exception as error:  # noqa: BLE001 - without AMX, or with another torch, there is nothing to allow
        logger.debug("AMX is not available: %s", error)
