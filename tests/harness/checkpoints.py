"""Tiny random checkpoints, written on the spot, that vLLM serves on a CPU."""

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

_DENSE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
# Every linear above 1 MiB: vLLM's CPU build keeps the weights of such layers in opaque oneDNN handles.
_WIDE = _DENSE | {"hidden_size": 1024, "intermediate_size": 1024, "num_key_value_heads": 8, "head_dim": 128}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_WIDE_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
_MLA = {key: value for key, value in _DENSE.items() if key != "head_dim"} | {
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
}
_MAMBA = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "state_size": 32,
    "num_heads": 16,
    "head_dim": 32,
    "expand": 2,
    "n_groups": 1,
}
MODELS: dict[str, Callable[[], tf.PreTrainedModel]] = {
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_DENSE)),
    "qwen3-tied": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_DENSE | {"tie_word_embeddings": True})),
    "qwen3-wide": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_WIDE)),
    "qwen3-moe": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**_DENSE, **_EXPERTS)),
    "qwen3-moe-wide": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**_WIDE, **_WIDE_EXPERTS)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_DENSE)),
    "deepseek-v2": lambda: tf.DeepseekV2ForCausalLM(tf.DeepseekV2Config(**_MLA)),
    # Counts as a mixture of experts, but has none: data-parallel ranks step together, which vLLM's CPU build cannot do
    # with experts.
    "deepseek-v2-dense": lambda: tf.DeepseekV2ForCausalLM(tf.DeepseekV2Config(**_MLA | {"first_k_dense_replace": 2})),
    "mamba2": lambda: tf.Mamba2ForCausalLM(tf.Mamba2Config(**_MAMBA)),
}


def random_model(name: str, seed: int) -> tf.PreTrainedModel:
    """A bfloat16 model whose every parameter depends on the seed, norms and biases too: none may go stale unseen."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # some parameters keep something of what transformers drew (the time steps of Mamba)
        model = MODELS[name]().to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    scale = 1.28 / model.config.hidden_size**0.5
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.copy_(noise * scale if param.dim() >= 2 else param + noise * 0.05)
    return model


def write_checkpoint(path: Path, name: str, seed: int) -> Path:
    """Write model and tokenizer of that name and seed into `path`; the same arguments give the same bytes."""
    random_model(name, seed).save_pretrained(path)
    _write_tokenizer(path)
    return path


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by their names in it."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def write_weights(path: Path, weights: dict[str, Tensor], *, like: Path) -> Path:
    """Write a checkpoint with these weights, and configuration and tokenizer of another; for what a trainer made."""
    path.mkdir(parents=True)
    for file in like.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, path)
    tensors = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def _write_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world"] * 10, trainer)
    tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    ).save_pretrained(path)
