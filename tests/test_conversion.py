"""A traced conversion is the function itself: same names, shapes and dtypes, and the same bytes as on real tensors."""

import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from trainer_client.conversion import checkpoint_converter, convert_shards
from trainer_client.packing import operation_of
from trainer_client.sources import collect, named_values
from vllm_nixl_plugin.errors import InvalidRequest


def assembled(convert, state):
    """The weights that the traced conversion says, put together from the bytes of ``state``, every byte once."""
    conversion = convert_shards(collect(state).shards, convert)
    made = {}
    for spec, parts in zip(conversion.weights, conversion.parts, strict=True):
        weight = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        written = torch.zeros(weight.numel() * weight.element_size(), dtype=torch.int32)
        for part in parts:
            source, copy = state[part.source].detach().contiguous(), part.copy
            values = strided(as_bytes(source), copy.shape, copy.src_itemsize, copy.src_offset, copy.src_strides)
            if part.program:
                values = values.contiguous().view(source.dtype).squeeze(-1)
                for step in part.program:
                    values = operation_of(step)(values)
                values = values.unsqueeze(-1).contiguous().view(torch.uint8)
            place = copy.shape, copy.dst_itemsize, copy.dst_offset, copy.dst_strides
            strided(as_bytes(weight), *place).copy_(values)
            strided(written, *place).add_(1)
        assert torch.all(written == 1), f"{spec.name} is not written once"
        made[spec.name] = weight
    return made


def as_bytes(tensor):
    return tensor.view(-1).view(torch.uint8)


def strided(memory, shape, itemsize, offset, strides):
    return memory.as_strided((*shape, itemsize), (*strides, 1), offset)


def check(convert, state):
    real = dict(convert(dict(state)))
    traced = assembled(convert, state)
    assert traced.keys() == real.keys()
    for name, tensor in real.items():
        assert (traced[name].dtype, traced[name].shape) == (tensor.dtype, tensor.shape), name
        assert np.array_equal(as_bytes(traced[name].contiguous()).numpy(), as_bytes(tensor.contiguous()).numpy()), name
    return traced


SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
MODELS = {
    "qwen3_moe": {"head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "n_group": 2, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 4, "first_k_dense_replace": 1,
    },
    "qwen3_next": {
        "head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    },
    "glm4_moe": {"head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
                 "first_k_dense_replace": 1},
    "jamba": {"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 4, "mamba_dt_rank": 4,
              "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_the_reverse_mapping_of_transformers_is_traced_exactly(kind) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **SMALL | MODELS[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = {name: torch.randn(t.shape).to(t.dtype) for name, t in model.state_dict().items()}
    traced = check(checkpoint_converter(model), state)
    packed = any(".experts." in name and t.dim() == 3 for name, t in state.items())
    assert packed, "this transformers packs no experts of this model: the test shows nothing"
    if kind != "gpt_oss":
        assert any(".experts.0." in name for name in traced)


@pytest.mark.parametrize(
    ("kind", "more"),
    [("qwen3", {"tie_word_embeddings": True}), ("qwen3", {"tie_word_embeddings": False}), ("qwen3_moe", {})],
)
def test_a_transformers_model_is_offered_exactly_as_save_pretrained_writes_it(kind, more, tmp_path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | MODELS["qwen3_moe"] | more))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    offered = assembled(checkpoint_converter(model), named_values(model))
    assert offered.keys() == saved.keys()
    assert all(torch.equal(offered[name], saved[name]) for name in saved)


def test_without_a_conversion_every_tensor_is_a_weight() -> None:
    shards = collect({"a": torch.zeros(2, 3), "b": torch.zeros(1, dtype=torch.float16)}).shards
    conversion = convert_shards(shards, None)
    assert [(w.name, w.shape, w.dtype) for w in conversion.weights] == [
        ("a", (2, 3), "float32"),
        ("b", (1,), "float16"),
    ]
    assert all(part.is_whole for (part,) in conversion.parts)


def test_a_conversion_that_only_renames_is_recognised_as_whole_tensors() -> None:
    shards = collect({"a": torch.zeros(2, 3)}).shards
    conversion = convert_shards(shards, lambda state: {f"model.{k}": v for k, v in state.items()})
    assert conversion.weights[0].name == "model.a"
    assert conversion.parts[0][0].is_whole


def megatron(state):
    """Groups of queries with their key and value, in one tensor; gate over up; a padded vocabulary."""
    heads, groups, dim = 8, 2, 4
    out = {}
    for name, tensor in state.items():
        if name.endswith("linear_qkv.weight"):
            grouped = tensor.view(groups, heads // groups + 2, dim, -1)
            q, k, v = grouped.split([heads // groups, 1, 1], dim=1)
            for key, part in zip("qkv", (q, k, v), strict=True):
                out[name.replace("linear_qkv", f"{key}_proj")] = part.reshape(-1, tensor.shape[-1])
        elif name.endswith("linear_qkv.bias"):
            rows = torch.arange(len(tensor)).view(groups, -1, dim)
            for key, index in zip("qkv", rows.split([heads // groups, 1, 1], dim=1), strict=True):
                out[name.replace("linear_qkv", f"{key}_proj")] = tensor[index.flatten()]
        elif name.endswith("linear_fc1.weight"):
            gate, up = tensor.chunk(2)
            out[name.replace("linear_fc1", "gate_proj")], out[name.replace("linear_fc1", "up_proj")] = gate, up
        elif name.startswith("embedding"):
            out["model.embed_tokens.weight"] = tensor[:30].to(torch.bfloat16)
        else:
            out[name.replace("decoder.", "model.")] = tensor
    return out


def stacked_layers(state):
    """One tensor for all layers, kernels as (in, out), heads apart, norms as what is added to 1, masters in fp32."""
    out = {}
    for layer, (q, o, norm) in enumerate(zip(state["q"], state["o"], state["norm"], strict=True)):
        out[f"layers.{layer}.q_proj.weight"] = q.permute(1, 2, 0).reshape(-1, q.shape[0]).to(torch.bfloat16)
        out[f"layers.{layer}.o_proj.weight"] = o.flatten(0, 1).t().contiguous().bfloat16()
        out[f"layers.{layer}.norm.weight"] = (norm + 1).half()
        out[f"layers.{layer}.negated.weight"] = -(norm - 0.5) / 3
    out["embed.weight"] = state["embed"] * math.sqrt(state["embed"].shape[1])
    out["head.weight"] = torch.tensor(0.125) * state["embed"].to(torch.bfloat16) * torch.tensor(3.0)
    return out.items()


def experts(state):
    """Lists of experts to packed ones and back, in tensors made first and written then; rotary halves interleaved."""
    n = sum(name.startswith("expert") for name in state) // 2
    up = torch.empty(n, 6, 2 * 4, dtype=torch.float16)
    for i in range(n):
        up[i, :, 0::2] = state[f"expert.{i}.gate"].t()
        up[i, :, 1::2].copy_(state[f"expert.{i}.up"].t() * 0.5)
    out = {"packed": up, "reversed": torch.stack([state[f"expert.{i}.up"] for i in reversed(range(n))], dim=1)}
    q = state["q"]
    rotary = torch.cat([torch.arange(0, len(q), 2), torch.arange(1, len(q), 2)])
    out["by_index"] = q[rotary]
    out["by_view"] = q.view(-1, 2, q.shape[1]).transpose(0, 1).reshape(q.shape)
    out["back"] = put_back(q, rotary)
    out["columns"] = torch.index_select(q, 1, torch.tensor([2, 0, 0]))
    out["chosen"] = q[:, torch.tensor([True, False, True, False, True])]
    out["last_first"] = q[torch.tensor([[-1, 0], [1, 1]])]
    return out


def put_back(q, rows):
    out = torch.zeros(q.shape, dtype=q.dtype)
    out[rows] = q
    return out


def moved(state):
    """Every operation that is rewritten, once."""
    w, v = state["w"], state["v"]
    padded = w.new_zeros(9, 5)
    padded[:7] = w
    padded[7:] = w[:2]
    full = torch.full((2, 7), 2.0)
    full[0], full[1] = v, 1 - v
    ones = torch.ones_like(w, dtype=torch.float64)
    ones.copy_(w)
    return {
        "repeat": w.repeat(2, 3), "repeat_more": v.repeat(2, 1, 2), "interleave": torch.repeat_interleave(v, 3),
        "flip": w.flip(0, 1), "roll": torch.roll(w, (2, -1), (0, 1)), "roll_all": torch.roll(w, 3),
        "unpadded": torch.nn.functional.pad(w, (0, 2, 1, 0))[1:, :5], "padded": padded, "full": full, "ones": ones,
        "none": w[torch.tensor([], dtype=torch.long)], "scalar": v[torch.tensor(3)],
        "mean": (v + torch.tensor(2.0, dtype=v.dtype)) / 7,
        "in_place": w.clone().mul_(0.5).sub_(torch.tensor(1.0)), "bytes": w.view(torch.int16),
        "tiled": torch.tile(v, (2,)), "hsplit": torch.hsplit(w, [2])[1], "kept": w,
    }  # fmt: skip


MADE_UP = {
    megatron: {
        "decoder.layers.0.linear_qkv.weight": (48, 16), "decoder.layers.0.linear_qkv.bias": (48,),
        "decoder.layers.0.linear_fc1.weight": (24, 16), "embedding.weight": (32, 16), "decoder.norm.weight": (16,),
    },
    stacked_layers: {"q": (3, 16, 4, 5), "o": (3, 4, 5, 16), "norm": (3, 16), "embed": (11, 16)},
    experts: {**{f"expert.{i}.{k}": (4, 6) for i in range(3) for k in ("gate", "up")}, "q": (8, 5)},
    moved: {"w": (7, 5), "v": (7,)},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("convert", MADE_UP, ids=lambda convert: convert.__name__)
def test_a_converter_is_traced_to_what_it_does_on_data(convert, dtype) -> None:
    torch.manual_seed(1)
    state = {name: torch.randn(shape).to(dtype) for name, shape in MADE_UP[convert].items()}
    check(convert, state)
    with torch.inference_mode():
        check(convert, state)


def test_what_convert_makes_takes_no_memory() -> None:
    """A whole model would not fit: 2 TiB are named, written to and returned."""
    from trainer_client.sources import Shard

    whole = Shard("w", "float32", 4, (1 << 19, 1 << 20), (0, 0), (1, 1), 0, 0, (4, 4))

    def convert(state):
        made = torch.empty(1 << 20, 1 << 19)
        made[:] = state["w"].t()
        return {"a": made, "b": torch.zeros(1 << 19, 1 << 20).add_(0).copy_(state["w"])}

    conversion = convert_shards([whole], convert)
    assert [len(parts) for parts in conversion.parts] == [1, 1]


def half_written(state):
    made = torch.empty(8)
    made[:4] = state["a"]
    return {"b": made}


def padded(state):
    return {"b": torch.nn.functional.pad(state["a"], (0, 2))}


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda s: {"b": s["a"] * s["a"].max().item()}, r"convert calls .*on the values of a; it runs once"),
        (lambda s: {"b": s["a"] if (s["a"] > 0).all() else -s["a"]}, r"convert calls .*on the values of a"),
        (lambda s: {"b": s["a"][s["a"] > 0]}, r"convert calls .*on the values of a"),
        (lambda s: {"b": torch.from_numpy(s["a"].numpy())}, r"convert calls numpy on the values of"),
        (lambda s: {"b": s["a"].softmax(0)}, r"weight b comes from .*softmax.* on a, which does more than move"),
        (lambda s: {"b": s["a"] + s["a"]}, r"weight b comes from .*add.* on a"),
        (lambda s: {"b": torch.outer(s["a"], s["a"])}, r"weight b comes from .*mul.* on a"),
        (lambda s: {"b": torch.zeros(2)}, r"weight b has elements that convert sets to 0"),
        (padded, r"weight b has elements that convert sets to 0"),
        (half_written, r"weight b has elements that convert never writes"),
        (lambda s: {"b": torch.arange(3)}, r"weight b comes from a tensor that convert did not get"),
        (lambda s: [("b", s["a"]), ("b", s["a"])], r"returned b twice"),
        (lambda s: {"b": 1}, r"returned 'b': int"),
        (lambda s: None, r"convert returned NoneType; expected a mapping"),
    ],
)
def test_a_conversion_that_cannot_be_traced_is_refused_by_name(convert, message) -> None:
    with pytest.raises(InvalidRequest, match=message):
        convert_shards(collect({"a": torch.zeros(4)}).shards, convert)


def test_an_error_of_the_converter_itself_is_raised_as_it_is() -> None:
    with pytest.raises(KeyError, match="missing") as caught:
        convert_shards(collect({"a": torch.zeros(4)}).shards, lambda state: {"b": state["missing"]})
    assert "raised by convert" in caught.value.__notes__[0]
    with pytest.raises(IndexError, match="out of bounds"):
        convert_shards(collect({"a": torch.zeros(4)}).shards, lambda s: {"b": s["a"][torch.tensor([4])]})
