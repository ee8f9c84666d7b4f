r"""Weight updates of running vLLM servers by one-sided NIXL writes: the server side.

The path of a byte, stage by stage:

    trace -> plan -> register -> publish | route -> transfer -> install
    `------ vllm_nixl_plugin ----------' `-- trainer_client --'  `- plugin

`plugin` is what vLLM loads: routes (`api`) and, in each worker, one RPC method (`worker`). `updates` drives an update
over all workers of a server; `session` is its state machine in each worker; a plane (`plane`) does the work.

    VLLM_PLUGINS=nixl PUSH_WEIGHTS_TOKEN=... \
        vllm serve MODEL --worker-extension-cls vllm_nixl_plugin.NixlWorkerExtension
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_nixl_plugin.worker import NixlWorkerExtension

__all__ = ["NixlWorkerExtension", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "NixlWorkerExtension":
        from vllm_nixl_plugin.worker import NixlWorkerExtension

        return NixlWorkerExtension
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
