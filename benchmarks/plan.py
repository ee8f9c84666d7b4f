"""How long a worker takes to plan for a model as large as DeepSeek-V3, and how large its plan is.

    python benchmarks/plan.py [--ep 32] [--rank 3] [--json FILE]

The real configuration, block-FP8 weights, experts spread over ``--ep`` data-parallel workers; one worker's view of the
model, with tensors on meta, in one process without the others (tests/fidelity/view.py). Prints seconds by stage: the
first time, and again from the worker's cache by the digest of the manifest. No GPU, no weights, about 2 GB of memory.
"""

import argparse
import cProfile
import json
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent / "tests"), str(Path(__file__).parent.parent)]
BLOCK = 128


def weights(config: Any) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of every tensor of the published checkpoint, but for its extra prediction layer."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    query = config.qk_nope_head_dim + config.qk_rope_head_dim

    def linear(name: str, out: int, width: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
        yield f"{name}.weight", (out, width), "float8_e4m3fn"
        yield f"{name}.weight_scale_inv", (-(-out // BLOCK), -(-width // BLOCK)), "float32"

    def mlp(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
        yield from linear(f"{name}.gate_proj", width, hidden)
        yield from linear(f"{name}.up_proj", width, hidden)
        yield from linear(f"{name}.down_proj", hidden, width)

    yield "model.embed_tokens.weight", (config.vocab_size, hidden), "bfloat16"
    for number in range(config.num_hidden_layers):
        layer = f"model.layers.{number}"
        attention = f"{layer}.self_attn"
        yield from linear(f"{attention}.q_a_proj", config.q_lora_rank, hidden)
        yield f"{attention}.q_a_layernorm.weight", (config.q_lora_rank,), "bfloat16"
        yield from linear(f"{attention}.q_b_proj", heads * query, config.q_lora_rank)
        yield from linear(f"{attention}.kv_a_proj_with_mqa", config.kv_lora_rank + config.qk_rope_head_dim, hidden)
        yield f"{attention}.kv_a_layernorm.weight", (config.kv_lora_rank,), "bfloat16"
        yield from linear(f"{attention}.kv_b_proj", heads * (config.qk_nope_head_dim + config.v_head_dim),
                          config.kv_lora_rank)  # fmt: skip
        yield from linear(f"{attention}.o_proj", hidden, heads * config.v_head_dim)
        if number < config.first_k_dense_replace:
            yield from mlp(f"{layer}.mlp", config.intermediate_size)
        else:
            yield f"{layer}.mlp.gate.weight", (config.n_routed_experts, hidden), "bfloat16"
            yield f"{layer}.mlp.gate.e_score_correction_bias", (config.n_routed_experts,), "float32"
            for expert in range(config.n_routed_experts):
                yield from mlp(f"{layer}.mlp.experts.{expert}", config.moe_intermediate_size)
            yield from mlp(f"{layer}.mlp.shared_experts", config.moe_intermediate_size * config.n_shared_experts)
        yield f"{layer}.input_layernorm.weight", (hidden,), "bfloat16"
        yield f"{layer}.post_attention_layernorm.weight", (hidden,), "bfloat16"
    yield "model.norm.weight", (hidden,), "bfloat16"
    yield "lm_head.weight", (config.vocab_size, hidden), "bfloat16"


class Clock:
    """Seconds by stage, and those that this thread had of a processor: other programs slow the former down."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.spent: dict[str, float] = {}

    def __call__(self, stage: str, function: Any) -> Any:
        start, spent = time.perf_counter(), time.thread_time()
        result = function()
        self.seconds[stage], self.spent[stage] = time.perf_counter() - start, time.thread_time() - spent
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ep", type=int, default=32, help="workers that the experts are spread over")
    parser.add_argument("--rank", type=int, default=3)
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", help="show where this stage spends its time")
    options = parser.parse_args()

    from fidelity.runner import prepare

    prepare()
    import torch
    import transformers

    from fidelity.view import Layout, engine_config, take_place, twin_of
    from trainer_client.conversion import convert_shards
    from trainer_client.routing import Offer, compute_route
    from trainer_client.sources import Shard
    from vllm_nixl_plugin.encoding import decode_plan, encode_plan
    from vllm_nixl_plugin.layout import contiguous_strides
    from vllm_nixl_plugin.loadtrace import trace_load
    from vllm_nixl_plugin.plan_cache import PlanCache
    from vllm_nixl_plugin.planning import make_plan
    from vllm_nixl_plugin.selfcheck import SelfCheck
    from vllm_nixl_plugin.wire import Manifest, WeightSpec

    clock = Clock()
    more = {"num_hidden_layers": options.layers} if options.layers else {}
    config = transformers.DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"], topk_method="noaux_tc", scoring_func="sigmoid", **more,
        quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                             "weight_block_size": [BLOCK, BLOCK]},
    )  # fmt: skip
    layout = Layout(dp=options.ep, ep=True)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        vllm_config = engine_config(folder, layout, options.rank)
    take_place(vllm_config, layout, options.rank)
    twin = clock("build the view", lambda: twin_of(vllm_config))
    manifest = clock("describe the weights", lambda: Manifest(
        weights=[WeightSpec(name=n, shape=s, dtype=d) for n, s, d in weights(config)]))  # fmt: skip
    text = manifest.model_dump_json().encode()

    stages = Clock()
    check = SelfCheck(twin, "sample")
    found: dict[str, Any] = {}

    def staged(stage: str, function: Any) -> Any:
        if options.profile != stage:
            return stages(stage, function)
        with cProfile.Profile() as profile:
            result = stages(stage, function)
        pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
        return result

    def plan(given: Manifest) -> Any:
        traced = staged("trace", lambda: trace_load(twin, given.weights, set()).destinations)
        planned = staged("plan", lambda: make_plan(given, traced, None, ()))
        found["check"] = staged("self-check", lambda: check.check(given.weights, traced, planned))
        return planned.plan

    cache = PlanCache(plan)

    def through_cache() -> Any:
        digest = manifest.digest()
        cache.start(digest, text)
        while (made := cache.poll(digest)) is None:
            time.sleep(0.02)
        return made

    made = clock("first time", through_cache)
    clock("from the cache", through_cache)
    blob = clock("encode", lambda: encode_plan(made.plan))
    decoded = clock("decode", lambda: decode_plan(blob))

    def offer() -> Any:
        sizes = {s.dtype: getattr(torch, s.dtype).itemsize for s in manifest.weights}
        shards = [
            Shard(s.name, s.dtype, sizes[s.dtype], s.shape, (0,) * len(s.shape), s.shape, i, 0,
                  contiguous_strides(s.shape, sizes[s.dtype]))
            for i, s in enumerate(manifest.weights)
        ]  # fmt: skip
        return Offer(shards, ["cuda:0"] * len(shards), convert_shards(shards, None))

    offered = clock("describe what a trainer has", offer)
    routed = clock("route", lambda: compute_route(
        offered, decoded, direct_run_bytes=16 << 10, buffer_bytes=64 << 20))  # fmt: skip
    assert routed.nbytes == made.plan.nbytes

    def total(seconds: dict[str, float], of_stages: dict[str, float]) -> dict[str, float]:
        return {
            "trace + plan + route, first time": of_stages["trace"] + of_stages["plan"] + seconds["route"],
            "from the cache + decode + route": seconds["from the cache"] + seconds["decode"] + seconds["route"],
        }

    result = {
        "model": "DeepSeek-V3", "layout": str(layout), "weights": len(manifest.weights), "manifest_nbytes": len(text),
        "copies": len(made.plan.copies), "destinations": len(made.plan.destinations), "plan_nbytes": made.plan.nbytes,
        "encoded_nbytes": len(made.blob), "unused": len(made.plan.unused), "self_check": found["check"].as_dict(),
        "processor_seconds": clock.spent | stages.spent | total(clock.spent, stages.spent),
        "seconds": clock.seconds | stages.seconds | total(clock.seconds, stages.seconds),
    }  # fmt: skip
    for key, value in result.items():
        if not key.endswith("seconds"):
            print(f"{key:16} {value:,}" if isinstance(value, int) else f"{key:16} {value}")
    for stage, seconds in result["seconds"].items():
        spent = result["processor_seconds"].get(stage)
        print(f"{stage:34}{seconds:9.3f} s" + (f"{spent:9.3f} s of a processor" if spent is not None else ""))
    if options.json:
        options.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # an orderly end makes Triton's bindings complain about leaks
