"""Trainers with fp32 masters: a bf16 server is as a fresh one of them, and what it holds in fp32 is not rounded."""

import re

import pytest
import torch

from harness import TOKEN, EngineOptions, Server, completions
from harness.checkpoints import _write_tokenizer, read_weights, write_checkpoint, write_weights
from trainer_client import WeightClient
from trainer_client.control import Control
from trainer_client.verification import compare

pytestmark = pytest.mark.server

KEPT = {"deepseek-v3": r"\.e_score_correction_bias$", "mamba2": r"\.A_log$"}
"""What vLLM holds in fp32 in these models, in a bf16 server too."""


@pytest.mark.parametrize("model", KEPT)
def test_fp32_masters_give_what_a_fresh_bf16_server_makes_of_their_checkpoint(model, tmp_path) -> None:
    from fidelity.models import write_checkpoints

    start, like = tmp_path / "start", tmp_path / "like"
    write_checkpoints({str(start): 1, str(like): 2}, model)
    for folder in (start, like):
        _write_tokenizer(folder)
    masters = {name: t.float() * 1.001 if t.is_floating_point() else t for name, t in read_weights(like).items()}
    half = {name: t.bfloat16() if t.is_floating_point() else t for name, t in masters.items()}
    kept = {name: masters[name] for name in masters if re.search(KEPT[model], name)}
    assert kept
    assert all(not torch.equal(tensor, half[name].float()) for name, tensor in kept.items())
    written = {"bf16": half, "fp32": masters, "bf16 but for what is kept": half | kept}
    with Server(start) as server, WeightClient([server.url], token=TOKEN) as client:
        for number, (title, weights) in enumerate(written.items()):
            client.push_weights(half if title == "bf16" else masters)
            with Server(write_weights(tmp_path / str(number), weights, like=like)) as fresh:
                pushed, new = (Control(s.url, token=TOKEN) for s in (server, fresh))
                workers = compare(pushed, new, outputs=False).workers
                assert all(row.equal for row in workers), (title, workers)
                assert completions(server.url) == completions(fresh.url), title
                pushed.close(), new.close()
        with Server(tmp_path / "0") as fresh:
            pushed, new = (Control(s.url, token=TOKEN) for s in (server, fresh))
            unlike = [line for row in compare(pushed, new, outputs=False).workers for line in row.differences]
            assert unlike, "without the kept precision nothing differs: the test shows nothing"
            pushed.close(), new.close()


PAIRS = [
    ("float16", "bfloat16"),
    *(pytest.param(*pair, marks=pytest.mark.thorough) for pair in (("bfloat16", "float16"), ("float32", "float16"))),
]


@pytest.mark.parametrize(("trainer", "served"), PAIRS)
def test_any_half_precision_of_trainer_and_server_gives_what_a_fresh_server_makes_of_it(trainer, served, tmp_path):
    options = EngineOptions(dtype=served)
    start = write_checkpoint(tmp_path / "start", "qwen3", 1)
    weights = {n: (t.float() * 1.001).to(getattr(torch, trainer)) for n, t in read_weights(start).items()}
    path = write_weights(tmp_path / "new", weights, like=start)
    with Server(start, options) as server, Server(path, options) as fresh:
        with WeightClient([server.url], token=TOKEN, progress=False) as client:
            client.push_weights(weights)
        pushed, new = (Control(s.url, token=TOKEN) for s in (server, fresh))
        workers = compare(pushed, new, outputs=False).workers
        assert all(row.equal for row in workers), workers
        assert completions(server.url) == completions(fresh.url)
        pushed.close(), new.close()
