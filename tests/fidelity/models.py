"""Tiny random checkpoints of many architectures, and how vLLM runs each."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from fidelity.quantized import quantize
from harness.checkpoints import _write_tokenizer

_DENSE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HEADS = _DENSE | {"head_dim": 32}
# Every linear above 1 MiB: vLLM's CPU build keeps the weights of such layers in opaque handles.
_WIDE = _HEADS | {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8,
                  "head_dim": 128, "vocab_size": 1024}  # fmt: skip
_MLA = _DENSE | {
    "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
    "v_head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
# Sizes of which every shard on up to four ranks is made of whole 128 by 128 blocks.
_BLOCKS = _DENSE | {"hidden_size": 512, "intermediate_size": 512, "head_dim": 128, "num_key_value_heads": 4}
_SCALES = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}


@dataclass(frozen=True)
class Model:
    """``build``: makes the model; ``runner``: generate, see, embed or classify; ``args``: more for `vllm.LLM`."""

    build: Callable[[], tf.PreTrainedModel]
    runner: str = "generate"
    args: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    processor: str | None = None
    """Writes what a model that sees needs beside its weights."""
    quantize: str | None = None
    """A form that the linears of the checkpoint are packed into."""
    names: Callable[[str], str] | None = None
    """Where vLLM and this transformers differ: vLLM's name of a tensor in the checkpoint."""


def _lm(name: str, **config: Any) -> Model:
    """The causal model and configuration that transformers has under a common name."""
    return Model(lambda: getattr(tf, f"{name}ForCausalLM")(getattr(tf, f"{name}Config")(**config)))


IMAGE_TOKEN = 512

def _odd(kind: str) -> Model:
    """Llama with a loader of odd.py or fooling.py."""
    args = {"hf_overrides": {"architectures": [f"{kind}ForCausalLM"]}}
    return Model(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_DENSE)), args=args)


MODELS: dict[str, Model] = {
    # dense
    "llama": _lm("Llama", **_DENSE),
    "llama-biases": _lm("Llama", **_DENSE, attention_bias=True, mlp_bias=True),
    "llama-fp32-checkpoint": Model(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_DENSE)), dtype=torch.float32),
    "llama-wide": _lm("Llama", **_WIDE),
    "mistral": _lm("Mistral", **_DENSE, sliding_window=32),
    "qwen2": _lm("Qwen2", **_DENSE),
    "qwen2-tied": _lm("Qwen2", **_DENSE | {"tie_word_embeddings": True}),
    "qwen3": _lm("Qwen3", **_HEADS),
    "qwen3-tied": _lm("Qwen3", **_HEADS | {"tie_word_embeddings": True}),
    "phi3": _lm("Phi3", **_DENSE),
    "phi": _lm("Phi", **_DENSE | {"num_key_value_heads": 4}),
    "gemma": _lm("Gemma", **_HEADS | {"tie_word_embeddings": True}),
    "gemma2": _lm("Gemma2", **_HEADS | {"tie_word_embeddings": True}, sliding_window=32, query_pre_attn_scalar=32),
    "gemma3": Model(lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(
        **_HEADS | {"tie_word_embeddings": True}, sliding_window=32, query_pre_attn_scalar=32))),
    "gpt2": Model(lambda: tf.GPT2LMHeadModel(tf.GPT2Config(
        vocab_size=512, n_embd=128, n_layer=2, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2))),
    "gpt-j": _lm("GPTJ", vocab_size=512, n_embd=128, n_layer=2, n_head=4, n_positions=512, rotary_dim=16,
                 bos_token_id=1, eos_token_id=2),
    "gpt-neox": _lm("GPTNeoX", **{k: v for k, v in _DENSE.items() if k != "num_key_value_heads"}),
    "gpt-bigcode": _lm("GPTBigCode", vocab_size=512, n_embd=128, n_layer=2, n_head=4, n_positions=512, multi_query=True,
                       bos_token_id=1, eos_token_id=2),
    "opt": _lm("OPT", vocab_size=512, hidden_size=128, ffn_dim=256, num_hidden_layers=2, num_attention_heads=4,
               max_position_embeddings=512, word_embed_proj_dim=128, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "bloom": _lm("Bloom", vocab_size=512, hidden_size=128, n_layer=2, n_head=4, pad_token_id=0, bos_token_id=1,
                 eos_token_id=2),
    "falcon": _lm("Falcon", vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, alibi=False,
                  new_decoder_architecture=False, multi_query=True, bias=False, bos_token_id=1, eos_token_id=2),
    "falcon-new": _lm("Falcon", vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
                      num_kv_heads=2, alibi=False, new_decoder_architecture=True, bias=True, bos_token_id=1,
                      eos_token_id=2),
    "starcoder2": _lm("Starcoder2", **_DENSE),
    "stablelm": _lm("StableLm", **_DENSE, use_qkv_bias=True),
    "glm": _lm("Glm", **_HEADS),
    "glm4": _lm("Glm4", **_HEADS),
    "granite": _lm("Granite", **_DENSE, **_SCALES),
    "olmo": _lm("Olmo", **_DENSE),
    "olmo2": _lm("Olmo2", **_DENSE),
    "olmo3": _lm("Olmo3", **_DENSE),
    "cohere": _lm("Cohere", **_DENSE | {"tie_word_embeddings": True}, use_qk_norm=True),
    "cohere2": _lm("Cohere2", **_DENSE | {"tie_word_embeddings": True}, sliding_window=32),
    "exaone4": _lm("Exaone4", **_DENSE, sliding_window=32),
    "nemotron": _lm("Nemotron", **_DENSE),
    "apertus": _lm("Apertus", **_DENSE),
    "smollm3": _lm("SmolLM3", **_DENSE),
    "ernie4.5": _lm("Ernie4_5", **_HEADS),
    "seed-oss": _lm("SeedOss", **_HEADS),
    # mixtures of experts
    "mixtral": _lm("Mixtral", **_DENSE, num_local_experts=4, num_experts_per_tok=2),
    "qwen2-moe": _lm("Qwen2Moe", **_DENSE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
                     shared_expert_intermediate_size=128),
    "qwen3-moe": _lm("Qwen3Moe", **_HEADS, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64),
    "qwen3-moe-wide": _lm("Qwen3Moe", **_WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=512),
    "olmoe": _lm("Olmoe", **_DENSE, num_experts=8, num_experts_per_tok=2),
    "phimoe": Model(lambda: tf.PhimoeForCausalLM(tf.PhimoeConfig(
        **_DENSE, num_local_experts=4, num_experts_per_tok=2, attention_bias=True, lm_head_bias=True)),
        args={"hf_overrides": {"architectures": ["PhiMoEForCausalLM"]}}),
    "deepseek-v2": _lm("DeepseekV2", **_MLA, topk_method="greedy"),
    "deepseek-v3": _lm("DeepseekV3", **_MLA | {"q_lora_rank": 64}, topk_method="noaux_tc", scoring_func="sigmoid"),
    "glm4-moe": _lm("Glm4Moe", **_HEADS, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, n_group=1,
                    topk_group=1, moe_intermediate_size=64, first_k_dense_replace=1, use_qk_norm=True),
    "gpt-oss": _lm("GptOss", **_HEADS | {"num_hidden_layers": 2}, num_local_experts=4, num_experts_per_tok=2,
                   sliding_window=32),
    "gpt-oss-fp16": Model(lambda: tf.GptOssForCausalLM(tf.GptOssConfig(
        **_HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=32)), args={"dtype": "float16"}),
    "granite-moe": _lm("GraniteMoe", **_DENSE, **_SCALES, num_local_experts=4, num_experts_per_tok=2),
    "llama4": Model(lambda: tf.Llama4ForCausalLM(tf.Llama4TextConfig(
        **_HEADS, intermediate_size_mlp=256, num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=2,
        use_qk_norm=True))),
    "ernie4.5-moe": _lm("Ernie4_5_Moe", **_DENSE, moe_num_experts=4, moe_k=2, moe_intermediate_size=64,
                        moe_num_shared_experts=1, moe_layer_start_index=1),
    "minimax-m2": _lm("MiniMaxM2", **_HEADS, num_local_experts=4, num_experts_per_tok=2, rotary_dim=16,
                      scoring_func="sigmoid", use_routing_bias=True),
    # state spaces, linear attention and hybrids
    "mamba": _lm("Mamba", vocab_size=512, hidden_size=128, num_hidden_layers=2, state_size=16, bos_token_id=1,
                 eos_token_id=2, pad_token_id=0),
    "mamba2": _lm("Mamba2", vocab_size=512, hidden_size=128, num_hidden_layers=2, state_size=32, num_heads=8,
                  head_dim=32, expand=2, n_groups=1, bos_token_id=1, eos_token_id=2, pad_token_id=0),
    "falcon-mamba": _lm("FalconMamba", vocab_size=512, hidden_size=128, num_hidden_layers=2, state_size=16,
                        bos_token_id=1, eos_token_id=2, pad_token_id=0),
    "jamba": _lm("Jamba", **_DENSE, num_experts=4, num_experts_per_tok=2, expert_layer_period=2, expert_layer_offset=1,
                 attn_layer_period=2, attn_layer_offset=1, mamba_d_state=16, mamba_dt_rank=8, use_mamba_kernels=False),
    "granite-hybrid": _lm("GraniteMoeHybrid", **_DENSE, **_SCALES, num_local_experts=4, num_experts_per_tok=2,
                          shared_intermediate_size=128, mamba_n_heads=8, mamba_n_groups=1, mamba_d_state=32,
                          mamba_d_head=32, mamba_expand=2, layer_types=["mamba", "attention"]),
    "falcon-h1": _lm("FalconH1", **_HEADS, mamba_d_ssm=256, mamba_n_heads=8, mamba_d_head=32, mamba_n_groups=1,
                     mamba_d_state=32, mamba_chunk_size=64),
    "zamba2": _lm("Zamba2", **_DENSE | {"num_key_value_heads": 4, "num_hidden_layers": 4}, mamba_d_state=32,
                  n_mamba_heads=8, mamba_ngroups=1, mamba_headdim=32, num_mem_blocks=1, hybrid_layer_ids=[1, 3],
                  layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], use_mamba_kernels=False),
    "nemotron-h": _lm("NemotronH", **_HEADS, hybrid_override_pattern="M*-M", mamba_num_heads=8, mamba_head_dim=32,
                      ssm_state_size=32, n_groups=1, use_mamba_kernels=False),
    "qwen3-next": _lm("Qwen3Next", **_HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
                      shared_expert_intermediate_size=64, linear_num_key_heads=2, linear_num_value_heads=4,
                      linear_key_head_dim=128, linear_value_head_dim=128, full_attention_interval=2),
    "lfm2": _lm("Lfm2", **_DENSE, layer_types=["conv", "full_attention"], conv_dim=128, block_dim=128,
                block_auto_adjust_ff_dim=False),
    # quantized checkpoints, and quantization while loading
    "llama-w8a8": Model(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_DENSE)), quantize="w8a8"),
    "llama-w4a16": Model(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_DENSE)), quantize="w4a16"),
    "llama-awq": Model(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_DENSE)), quantize="awq"),
    "llama-gptq": Model(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_DENSE)), quantize="gptq"),
    "qwen3-moe-w8a8": Model(lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(
        **_HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)), quantize="w8a8"),
    "llama-fp8-online": Model(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_DENSE)), args={"quantization": "fp8"}),
    "qwen3-moe-int8-online": Model(lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(
        **_HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)),
        args={"quantization": "experts_int8"}),
    # vision and language
    "llava": Model(lambda: tf.LlavaForConditionalGeneration(tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3,
                                          num_attention_heads=2, image_size=32, patch_size=8, projection_dim=64),
        text_config=tf.LlamaConfig(**_DENSE | {"vocab_size": 640}), image_token_index=IMAGE_TOKEN)), "see",
        processor="llava",
        names=lambda name: re.sub("^(model.)?vision_tower.(?!vision_model)", "vision_tower.vision_model.", name)),
    "qwen2-vl": Model(lambda: tf.Qwen2VLForConditionalGeneration(tf.Qwen2VLConfig(
        text_config=_DENSE | {"vocab_size": 640, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}},
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 2, "patch_size": 8,
                       "spatial_merge_size": 2, "temporal_patch_size": 2},
        image_token_id=IMAGE_TOKEN, vision_start_token_id=IMAGE_TOKEN + 1, vision_end_token_id=IMAGE_TOKEN + 2,
        video_token_id=IMAGE_TOKEN + 3)), "see", processor="qwen-vl"),
    # pooling
    "qwen3-embedding": Model(lambda: tf.Qwen3Model(tf.Qwen3Config(**_HEADS)), "embed"),
    "qwen2-reward": Model(
        lambda: tf.Qwen2ForSequenceClassification(tf.Qwen2Config(**_DENSE, num_labels=1)), "classify"),
    "llama-classifier": Model(
        lambda: tf.LlamaForSequenceClassification(tf.LlamaConfig(**_DENSE, num_labels=4)), "classify"),
    "bert-embedding": Model(lambda: tf.BertModel(tf.BertConfig(
        vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)), "embed"),
    "roberta-classifier": Model(lambda: tf.RobertaForSequenceClassification(tf.RobertaConfig(
        vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        num_labels=3, pad_token_id=0)), "classify"),
    "modernbert-embedding": Model(lambda: tf.ModernBertModel(tf.ModernBertConfig(
        vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)), "embed"),
    # loaders that do what a trace cannot or can hardly follow (odd.py)
    "odd-looks": _odd("Looks"),
    "odd-exponentiates": _odd("Exponentiates"),
    "odd-merges": _odd("Merges"),
    "odd-replaces": _odd("Replaces"),
    "odd-notes": _odd("Notes"),
    "odd-caches": _odd("Caches"),
    # loaders that fool the tracer, found by the self-check (fooling.py)
    "fooling-recognizes": _odd("Recognizes"),
    "fooling-hides": _odd("Hides"),
    "fooling-pokes": _odd("Pokes"),
    "fooling-views": _odd("Views"),
    "fooling-swaps": _odd("Swaps"),
    "fooling-lies": _odd("Lies"),
}  # fmt: skip

TRACED: dict[str, Model] = {
    # forms of checkpoints that vLLM's CPU build has no kernels for: traced and planned only (layouts.py)
    "llama-fp8-channel": Model(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_DENSE)), quantize="fp8-channel"),
    "llama-fp8-tensor": Model(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_DENSE)), quantize="fp8-tensor"),
    "llama-fp8-block": Model(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_BLOCKS)), quantize="fp8-block"),
    "llama-fp8-kv": Model(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_DENSE)), quantize="fp8-kv",
                          args={"kv_cache_dtype": "fp8"}),
    "deepseek-v3-fp8-block": Model(lambda: tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(
        **_MLA | _BLOCKS | {"q_lora_rank": 256, "moe_intermediate_size": 256, "num_key_value_heads": 4,
                            "qk_nope_head_dim": 128, "v_head_dim": 128},
        topk_method="noaux_tc", scoring_func="sigmoid")), quantize="fp8-block"),
    "gpt-oss-mxfp4": Model(lambda: tf.GptOssForCausalLM(tf.GptOssConfig(
        **_HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=32)), quantize="mxfp4"),
}  # fmt: skip
ALL = MODELS | TRACED


def random_model(name: str, seed: int) -> tf.PreTrainedModel:
    """A model whose every parameter and saved buffer depends on the seed, norms and biases too."""
    torch.manual_seed(seed)
    spec = ALL[name]
    model = spec.build().to(spec.dtype)
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict()
    with torch.no_grad():
        for key, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
            if key in saved and tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(noise * _scale(tensor) if tensor.dim() >= 2 else tensor + noise * 0.05)
    return model


def _write_llava_processor(path: Path) -> None:
    size = {"height": 32, "width": 32}
    images = tf.CLIPImageProcessor(size=size, crop_size=size, do_resize=True, do_center_crop=False)
    tf.LlavaProcessor(
        images, _seeing_tokenizer(path, "<image>"), patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(path)  # fmt: skip


def _write_qwen_vl_processor(path: Path) -> None:
    tokenizer = _seeing_tokenizer(path, "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    sizes = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
    pixels = {"size": {"shortest_edge": 256, "longest_edge": 1024}}
    tf.Qwen2VLProcessor(
        tf.Qwen2VLImageProcessor(**sizes, **pixels), tokenizer, tf.Qwen2VLVideoProcessor(**sizes, **pixels)
    ).save_pretrained(path)


_PROCESSORS = {"llava": _write_llava_processor, "qwen-vl": _write_qwen_vl_processor}


def _seeing_tokenizer(path: Path, *special: str) -> tf.PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint, with special tokens from `IMAGE_TOKEN` on."""
    tokenizer = tf.AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([f"<{number}>" for number in range(len(tokenizer), IMAGE_TOKEN)])
    for token in special:
        tokenizer.add_special_tokens({"additional_special_tokens": [token]}, replace_extra_special_tokens=False)
    return tokenizer


def _scale(tensor: torch.Tensor) -> float:
    return float(1.28 / max(tensor.shape[-1], 16) ** 0.5)


def write_checkpoints(seeds: dict[str, int], name: str) -> None:
    """One checkpoint for each path, of its seed."""
    for path, seed in seeds.items():
        random_model(name, seed).save_pretrained(path)
        if ALL[name].quantize:
            quantize(Path(path), ALL[name].quantize)
        rename = ALL[name].names
        for file in Path(path).glob("*.safetensors") if rename is not None else ():
            save_file({rename(key): tensor for key, tensor in load_file(file).items()}, file, {"format": "pt"})
        if ALL[name].runner != "generate":
            _write_tokenizer(Path(path))
        if ALL[name].processor is not None:
            _PROCESSORS[ALL[name].processor](Path(path))


COMPILED = ["llama", "qwen3-tied", "gemma2", "gpt2", "qwen3-moe", "gpt-oss-fp16", "deepseek-v2", "mamba2",
            "granite-hybrid"]  # fmt: skip
TP2 = ["llama", "qwen3-tied", "phi3", "gpt2", "falcon", "gemma3", "qwen3-moe", "gpt-oss", "deepseek-v2", "mamba2"]
