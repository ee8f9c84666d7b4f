"""One engine in a process of its own: what it makes of a few prompts, its fingerprint, and weights pushed into it.

The push is the worker's own path (`WorkerPlane`: trace, plan, bind, install) with plain copies in the place of NIXL:
every copy of the plan is carried out, programs and all, by the trainer's own packing, at the addresses of the binding.
Runs in a forked child of `runner`, which has imported vLLM already.
"""

import ctypes
import time
from pathlib import Path
from typing import Any

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [7], list(range(40, 73)), [300, 17, 300, 17, 300]]
MODES = ("shadow", "in_place", "shadow")
_kept: list[Any] = []  # an orderly end costs a second, and the process is about to go


def fresh(path: Path, runner: str, args: dict[str, Any]) -> dict[str, Any]:
    """What a freshly started engine on a checkpoint gives."""
    return _observed(_start(path, runner, args), runner)


def pushed(start: Path, targets: list[Path], runner: str, args: dict[str, Any]) -> dict[str, Any]:
    """What an engine that started from one checkpoint gives after each of several pushes."""
    llm = _start(start, runner, args)
    steps = [_observed(llm, runner)]
    report: dict[str, Any] = {}
    for target, mode in zip(targets, MODES, strict=False):
        reports = llm.collective_rpc(_push, args=(str(target), mode))
        report = _sum_of(reports)
        llm.reset_prefix_cache()
        _reset_encoder_cache(llm)
        steps.append(_observed(llm, runner))
    return {"steps": steps, **report}


def _sum_of(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The report of the first worker, with the bytes of all."""
    homes: dict[str, int] = {}
    for report in reports:
        for home, nbytes in report["homes"].items():
            homes[home] = homes.get(home, 0) + nbytes
    return reports[0] | {"homes": homes}


def _reset_encoder_cache(llm: Any) -> None:
    """The engine's own pause drops it; a push without the pause has to ask."""
    llm.llm_engine.engine_core.reset_encoder_cache()


class _NoFabric:
    """In the place of a NIXL agent: writes are made by this process itself."""

    name = "none"

    def metadata(self) -> bytes:
        return b""

    def register(self, regions: Any) -> object:
        return object()


def _start(path: Path, runner: str, args: dict[str, Any]) -> Any:
    import torch._dynamo
    from vllm import LLM

    from fidelity import fooling, odd
    from vllm_nixl_plugin.model import install_hook

    install_hook()
    odd.register()
    fooling.register()
    torch._dynamo.config.disable = args.get("enforce_eager", True)
    kind = {} if runner in ("generate", "see") else {"runner": "pooling", "convert": runner}
    defaults = {"enforce_eager": True, "dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 4, "seed": 0,
                "kv_cache_memory_bytes": 1 << 26}
    llm = LLM(model=str(path), skip_tokenizer_init=runner == "generate", **{**defaults, **kind, **args})
    _kept.append(llm)
    return llm


def _observed(llm: Any, runner: str) -> dict[str, Any]:
    import torch
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs: list[Any] = []
    if runner == "see":
        image = {"multi_modal_data": {"image": _image()}}
        prompts = [{"prompt_token_ids": [1, 513, 512, 514, *prompt], **image} for prompt in PROMPTS]
    if runner in ("generate", "see"):
        params = SamplingParams(max_tokens=8, temperature=0, logprobs=5, detokenize=False, ignore_eos=True)
        for done in llm.generate(prompts, params, use_tqdm=False):
            found = done.outputs[0]
            top = [sorted((t, p.logprob) for t, p in d.items()) for d in found.logprobs]
            outputs.append([list(found.token_ids), top])
    else:
        for done in getattr(llm, runner)(prompts, use_tqdm=False):
            result = done.outputs.embedding if runner == "embed" else done.outputs.probs
            outputs.append(torch.as_tensor(result).float().tolist())
    prints = llm.collective_rpc(_fingerprint)
    several = len(prints) > 1
    merged = {f"worker {n}: {p}" if several else p: v for n, of in enumerate(prints) for p, v in of.items()}
    return {"outputs": outputs, "fingerprint": merged}


def _image() -> Any:
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.arange(32 * 32 * 3, dtype=np.uint32).reshape(32, 32, 3).astype(np.uint8))


# What follows runs in the workers.


def _fingerprint(worker: Any) -> dict[str, str]:
    from vllm_nixl_plugin.fingerprint import fingerprint

    return fingerprint(_real(worker))


def _real(worker: Any) -> Any:
    """The worker itself; vLLM hands out its wrapper."""
    return getattr(worker, "worker", None) or worker


def _push(worker: Any, target: str, mode: str) -> dict[str, Any]:
    from harness.checkpoints import read_weights
    from vllm_nixl_plugin import preparation
    from vllm_nixl_plugin.encoding import decode_plan, encode_plan
    from vllm_nixl_plugin.plane import create_plane
    from vllm_nixl_plugin.wire import Manifest, WeightSpec

    worker = _real(worker)
    plane = worker.__dict__.get("fidelity_plane")
    if plane is None:
        plane = worker.fidelity_plane = create_plane(worker)
        plane.binder.agent = _NoFabric()
        preparation.SLICE_NBYTES = 1
    weights = read_weights(Path(target))
    begin = time.perf_counter()
    manifest = Manifest(
        weights=[
            WeightSpec(name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
            for name, t in weights.items()
        ]
    )
    plan = plane.make_plan(manifest)
    planned_s = time.perf_counter() - begin
    if decode_plan(encode_plan(plan)) != plan:
        raise AssertionError("the plan changes on the wire")
    binding = plane.bind(plan, mode)
    _write(plan, binding, weights)
    begin = time.perf_counter()
    while not plane.prepare_install(plan, mode, whole=False):  # a module at a time
        pass
    [(_, change)] = plane.installer.preparation.changes
    counts = {"pours": len(change.pours), "rebinds": len(change.rebinds), "removals": len(change.removals)}
    counts["rebound"] = [path for path, _, _ in change.rebinds]
    plane.install(plan, mode)
    summary = plane.summary(plan)
    return {
        "plan_s": planned_s, "install_s": time.perf_counter() - begin, "homes": summary["nbytes_by_home"],
        "fallback": summary["fallback"], "unused": summary["unused"], **counts,
    }  # fmt: skip


def _write(plan: Any, binding: Any, weights: dict[str, Any]) -> None:
    import torch

    from trainer_client.batching import Batch, PackItem
    from trainer_client.packing import PreparedBatch

    storages = [weights[w.name].contiguous().untyped_storage() for w in plan.weights]
    for number, destination in enumerate(plan.destinations):
        if not destination.nbytes:
            continue
        items = tuple(
            PackItem(c.weight, plan.weights[c.weight].dtype, c.copy_, c.program)
            for c in plan.copies
            if c.destination == number
        )
        memory = (ctypes.c_uint8 * destination.nbytes).from_address(binding.addresses[number])
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        PreparedBatch(Batch("cpu", items, destination.nbytes, None), storages, buffer).fill()
