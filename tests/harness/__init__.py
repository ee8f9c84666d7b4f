"""Real servers and reference engines for the tests.

    def test_something(checkpoint):                             # conftest.py: tiny random checkpoints by name and seed
        with Server(checkpoint("qwen3", seed=1)) as server:     # a real `vllm serve` with our plugin, about 2 s
            ...                                                 # push the weights of seed 2
            assert completions(server.url) == reference(checkpoint("qwen3", seed=2), options=server.options)

Mark such tests `server`. `harness.checkpoints` (not imported here: it needs torch and transformers) has the models,
reads the weights of a checkpoint and writes checkpoints with given weights. `launcher.py` tells why starts are quick,
`startup/sitecustomize.py` why servers do not die of AMX. HARNESS_LAUNCH=exec starts every server as a user does.
"""

from harness.generation import PROMPTS, Completion, completions, reference
from harness.server import TOKEN, EngineOptions, Launcher, Server, close_launcher, servers

__all__ = [
    "PROMPTS",
    "TOKEN",
    "Completion",
    "EngineOptions",
    "Launcher",
    "Server",
    "close_launcher",
    "completions",
    "reference",
    "servers",
]
