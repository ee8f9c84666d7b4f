"""Is a server that was pushed to equal to a freshly started one? Over models, kinds of quantization, and modes.

Each case starts two servers or three: one on checkpoint A that receives B (shadow), A (in place), B (in place) and A
(shadow), and fresh ones on B. After every push tokens and logprobs are compared, and after the first the fingerprint:
checksums of everything that the engine can read. `run` works on as many cases at once as there are slots for servers;
`gpu.py fidelity` and `gpu.py quantized` call it with `FIDELITY` and `QUANTIZED`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers as tf
from safetensors.torch import save_file

from fidelity.quantized import quantize
from gpu_servers import (
    TOKEN,
    Report,
    Server,
    difference,
    end_of,
    fingerprint_difference,
    homes,
    root_cause,
    server,
    start_all,
)
from harness.checkpoints import _write_tokenizer, read_weights
from harness.generation import Completion, completions
from trainer_client import BlockFP8, PushFailed, WeightClient


def build(model: str, width: int) -> tf.PreTrainedModel:
    """A model of two layers and so many columns; a multiple of 256, as the kernels want it."""
    sizes: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2,
        "num_attention_heads": width // 64, "num_key_value_heads": width // 128, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    heads = sizes | {"head_dim": 64}
    if model == "dense":
        return tf.Qwen3ForCausalLM(tf.Qwen3Config(**heads))
    if model == "moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": width // 2}
        return tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**heads, **experts))
    if model == "packed-moe":
        return tf.GptOssForCausalLM(tf.GptOssConfig(
            **heads | {"intermediate_size": width // 2}, num_local_experts=8, num_experts_per_tok=2,
            sliding_window=32))  # fmt: skip
    assert model == "latent-moe", model
    return tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(
        **sizes | {"num_attention_heads": 8, "num_key_value_heads": 8}, kv_lora_rank=512, q_lora_rank=256,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=2, moe_intermediate_size=width // 2, first_k_dense_replace=1, n_group=1, topk_group=1,
        topk_method="noaux_tc", scoring_func="sigmoid"))  # fmt: skip


@dataclass(frozen=True)
class Case:
    """``form``: of `fidelity.quantized.FORMS`; ``graphs``: compiled, with CUDA graphs, else eager; ``args``, ``env``:
    more for `vllm serve`; ``bare``: a second fresh server, without the plugin; ``does``: what else is tried; ``cpu``:
    vLLM's CPU build runs it too, and not too slowly; ``modes``: of the four pushes."""

    name: str
    model: str
    form: str | None = None
    args: tuple[str, ...] = ()
    graphs: bool = False
    env: dict[str, str] = field(default_factory=dict)
    bare: bool = False
    does: str = ""
    cpu: bool = True
    modes: tuple[str, str, str, str] = ("shadow", "in_place", "in_place", "shadow")

    @property
    def n_servers(self) -> int:
        return 3 if self.bare else 2


_NO_DEEP_GEMM = {"VLLM_USE_DEEP_GEMM": "0"}  # it compiles kernels at run time, and the smallest installs cannot
_ONLINE = ("--quantization", "fp8")
FIDELITY = [
    Case("dense bf16", "dense", graphs=True, bare=True),
    Case("MoE bf16", "moe", graphs=True, bare=True),
    Case("dense online FP8", "dense", args=_ONLINE, graphs=True, bare=True, cpu=False),
    Case("MoE online FP8", "moe", args=_ONLINE, graphs=True, bare=True, cpu=False),
]
QUANTIZED = [
    Case("dense block FP8", "dense", "fp8-block", graphs=True, env=_NO_DEEP_GEMM),
    Case("dense FP8, scale a channel", "dense", "fp8-channel", graphs=True, cpu=False),
    Case("dense INT4 group 32 (Marlin)", "dense", "w4a16", graphs=True),
    Case("MoE MXFP4", "packed-moe", "mxfp4", graphs=True),
    Case("dense block FP8 from bf16", "dense", "fp8-block", graphs=True, env=_NO_DEEP_GEMM, does="quantizes"),
    Case("MoE block FP8", "moe", "fp8-block", env=_NO_DEEP_GEMM),
    Case("MoE block FP8 from bf16", "moe", "fp8-block", env=_NO_DEEP_GEMM, does="quantizes"),
    Case("MLA MoE block FP8", "latent-moe", "fp8-block", env=_NO_DEEP_GEMM),
    Case("dense FP8, scale a tensor, static", "dense", "fp8-tensor", cpu=False),
    Case("dense FP8, KV cache scales", "dense", "fp8-kv", cpu=False),
    Case("MoE FP8, scale a channel", "moe", "fp8-channel", cpu=False),
    Case("dense INT8", "dense", "w8a8"),
    Case("dense INT4 group 128 (Machete)", "dense", "w4a16-g128"),
    Case("MoE INT4 group 32", "moe", "w4a16", cpu=False),
    Case("dense AWQ", "dense", "awq"),
    Case("dense GPTQ", "dense", "gptq"),
    Case("dense GPTQ, act order", "dense", "gptq-act-order", cpu=False),
    Case("MoE MXFP4 (Marlin)", "packed-moe", "mxfp4", args=("--moe-backend", "marlin"), cpu=False),
    Case("dense online FP8, eager", "dense", args=_ONLINE, cpu=False),
    Case("dense bf16 with an adapter", "dense", does="adapter"),
    Case("dense bf16, sleep mode", "dense", args=("--enable-sleep-mode",), does="sleep", cpu=False,
         env={"VLLM_SERVER_DEV_MODE": "1"}),
]  # fmt: skip

tf.utils.logging.disable_progress_bar()
_writing = threading.Lock()


def write(folder: Path, case: Case, seed: int, width: int) -> Path:
    """The checkpoint of a case and seed; every parameter depends on the seed, norms and biases too."""
    path = folder / f"{case.model}-{case.form}-{seed}"
    with _writing:  # transformers draws from the one generator that all threads share
        if not path.exists():
            torch.manual_seed(seed)
            model = build(case.model, width).to(torch.bfloat16)
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for param in model.parameters():
                    noise = torch.randn(param.shape, generator=generator)
                    scale = 1.28 / max(param.shape[-1], 16) ** 0.5
                    param.copy_(noise * scale if param.dim() >= 2 else param + noise * 0.05)
            model.save_pretrained(path)
            _write_tokenizer(path)
            if case.form:
                quantize(path, case.form)
    return path


def write_adapter(folder: Path, width: int, rank: int = 8) -> Path:
    """A LoRA adapter for the attention of the dense model, in PEFT's form."""
    path = folder / "adapter"
    with _writing:
        if path.exists():
            return path
        path.mkdir()
        generator = torch.Generator().manual_seed(7)
        rows = {"q_proj": width, "v_proj": width // 2}
        tensors = {
            f"base_model.model.model.layers.{layer}.self_attn.{target}.lora_{half}.weight":
                (torch.randn(shape, generator=generator) * 0.1).to(torch.bfloat16)
            for layer in range(2)
            for target, n in rows.items()
            for half, shape in (("A", (rank, width)), ("B", (n, rank)))
        }  # fmt: skip
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps({
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
            "lora_dropout": 0.0, "target_modules": sorted(rows), "base_model_name_or_path": "model"}))  # fmt: skip
    return path


def run(cases: Sequence[Case], folder: Path, report: Report, device: str, slots: int, budget_s: float) -> bool:
    """All cases; False when one is not equal or could not be tried. Cases that do not begin in time are named."""

    def one(case: Case) -> bool:
        if report.seconds > budget_s:
            report(f"{case.name:34} NOT RUN: the time is over")
            return False
        try:
            return _one(case, folder, report, device)
        except Exception as error:  # noqa: BLE001 - the other cases are worth their rows
            report(f"{case.name:34} FAILED", end_of(error))
            report.record(case=case.name, equal=False, error=str(error)[:2000])
            return False

    for case in [case for case in cases if device == "cpu" and not case.cpu]:
        report(f"{case.name:34} needs a GPU")
    cases = [case for case in cases if device == "cuda" or case.cpu]
    most = max(case.n_servers for case in cases)
    with ThreadPoolExecutor(max(1, slots // most)) as pool:
        fine = list(pool.map(one, cases))
    report(f"{sum(fine)} of {len(cases)} cases equal in everything, {report.seconds:.0f} s")
    return all(fine)


def _one(case: Case, folder: Path, report: Report, device: str) -> bool:
    width = 1024 if device == "cuda" else 256
    paths = {seed: write(folder, case, seed, width) for seed in (1, 2)}
    args = case.args
    if case.does == "adapter":
        args += ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"adapter={write_adapter(folder, width)}")
    eager = not case.graphs or device == "cpu"
    roles = {"pushed": (1, True), "fresh": (2, True)} | ({"bare": (2, False)} if case.bare else {})
    logs = {role: folder / f"{re.sub('[^A-Za-z0-9]+', '-', case.name)}-{role}.log" for role in roles}
    wanted = {
        role: server(paths[seed], *args, device=device, plugin=plugin, eager=eager, log=logs[role], **case.env)
        for role, (seed, plugin) in roles.items()
    }
    started: dict[str, Server] = {}
    try:
        started = start_all(wanted, report, f"{case.name:34} ")
        if len(started) < len(wanted):
            report.record(case=case.name, equal=False, error="did not start")
            return False
        plain = {seed: write(folder, replace(case, form=None), seed, width) for seed in (1, 2)}
        found = _Pushes(case, paths, plain, started, report, device).run()
        rows = found.rows
        fine = found.changed and set(rows.values()) == {"equal"}
        report(
            f"{case.name:34} {'equal' if fine else 'DIFFERENT'}  {'eager' if eager else 'graphs'}  "
            f"{'' if found.changed else 'A and B GENERATE THE SAME '}{found.note}",
            *(f"{'':34} {what:28} {how}" for what, how in rows.items() if not fine or how != "equal"),
        )
        report.record(case=case.name, equal=fine, graphs=not eager, rows=rows, note=found.note)
        if not fine:
            report.keep_log(f"{case.name} pushed", logs["pushed"])
        return fine
    except Exception:
        if "pushed" in started:
            report(f"{case.name:34} its server said:", *(f"    {line}" for line in root_cause(logs["pushed"], 8)))
            report.keep_log(f"{case.name} pushed", logs["pushed"])
        raise
    finally:
        for made in started.values():
            made.kill()


class _Pushes:
    """The pushes of one case. ``rows``: what was compared, and the result; ``note``: homes and kernels; ``plain``: the
    checkpoints in bf16, which a trainer that quantizes has."""

    def __init__(
        self, case: Case, paths: dict[int, Path], plain: dict[int, Path], started: dict[str, Server], report: Report,
        device: str,
    ) -> None:  # fmt: skip
        self.case, self.paths, self.plain, self.started = case, paths, plain, started
        self.report, self.device = report, device
        self.rows: dict[str, str] = {}
        self.changed, self.note = False, ""
        self._url = started["pushed"].url

    def run(self) -> _Pushes:
        for made in self.started.values():
            self._generate(made.url)  # the first requests of an engine compile kernels
        fresh = [self._generate(made.url) for role, made in self.started.items() if role != "pushed"]
        want = {2: fresh, 1: [self._generate(self._url)]}
        self.changed = want[1][0] not in fresh
        self.rows["same engine twice"] = difference(self._generate(self._url), want[1])
        if self.case.bare:
            self.report(f"{self.case.name:34} two fresh engines: {difference(fresh[0], fresh[1:])}")
        with WeightClient([self._url], token=TOKEN, timeout_s=180) as client:
            if self.case.does == "sleep":
                self._asleep(client, want)
            for n, (seed, mode) in enumerate(zip((2, 1, 2, 1), self.case.modes, strict=True)):
                self._push(client, seed, mode)
                self.rows[f"push {n + 1} {mode}"] = difference(self._generate(self._url), want[seed])
                if seed == 2:
                    self.rows[f"fingerprint {n + 1}"] = fingerprint_difference(self._url, self.started["fresh"].url)
        self.note = f"{homes(self._url)} {self._kernels()}"
        return self

    def _generate(self, url: str) -> tuple[Completion, ...]:
        found = completions(url, n_tokens=16 if self.device == "cuda" else 4)
        if self.case.does == "adapter":
            adapted = completions(url, n_tokens=16 if self.device == "cuda" else 4, model="adapter")
            if adapted == found:
                raise RuntimeError("the adapter changes nothing")
            found += adapted
        return found

    def _push(self, client: WeightClient, seed: int, mode: Any) -> None:
        quantizes = BlockFP8() if self.case.does == "quantizes" else None
        path = self.paths[seed] if quantizes is None else self.plain[seed]
        weights = {name: tensor.to(self.device) for name, tensor in read_weights(path).items()}
        client.push_weights(weights, mode=mode, quantize=quantizes)

    def _asleep(self, client: WeightClient, want: dict[int, list[tuple[Completion, ...]]]) -> None:
        """A sleeping engine refuses a push and is what it was once it wakes up."""
        for path in ("/sleep?level=1", "/wake_up"):
            httpx.post(f"{self._url}{path}", timeout=120).raise_for_status()
            if path == "/wake_up":
                self.rows["woken up"] = difference(self._generate(self._url), want[1])
                continue
            try:
                self._push(client, 2, "shadow")
                self.rows["push while asleep"] = "NOT REFUSED"
            except PushFailed as error:
                code = error.report.servers[0].error_code if error.report else None
                self.rows["push while asleep"] = "equal" if code == "asleep" else f"refused as {code}: {error}"[:300]

    def _kernels(self) -> str:
        """What the server's output says of the kernels that it chose."""
        text = self.started["pushed"].log.read_text(errors="replace")
        chosen = re.findall(r"(?:Using|Selected) '?(\w+)'? (?:for \w+|(?:\w+ )?MoE backend|attention backend)", text)
        return " ".join(dict.fromkeys(chosen))
