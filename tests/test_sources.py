"""What a trainer has becomes shards and checkpoint weights, or an error that names the tensor and the remedy."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from trainer_client.checkpoint import read_checkpoint
from trainer_client.sources import collect, named_values
from vllm_nixl_plugin.errors import InvalidRequest


def test_a_shard_says_where_its_elements_lie() -> None:
    base = torch.zeros(10, 6, dtype=torch.bfloat16)
    sources = collect({"w": base[2:, 1:5].t()})
    (shard,), (storage,) = sources.shards, sources.storages
    assert (shard.dtype, shard.itemsize, shard.shape, shard.offsets) == ("bfloat16", 2, (4, 8), (0, 0))
    assert (shard.offset_bytes, shard.strides_bytes) == (26, (2, 12))
    assert (storage.address, storage.nbytes, storage.device) == (base.data_ptr(), 120, "cpu")
    assert sources.nbytes == 64


def test_tensors_in_one_storage_share_it() -> None:
    flat = torch.zeros(12)
    sources = collect({"a": flat[:4], "b": flat[4:].view(2, 4)})
    assert len(sources.storages) == 1
    assert [s.storage for s in sources.shards] == [0, 0]


def test_sources_are_the_same_place_only_while_the_memory_is_the_same() -> None:
    state = {"a": torch.zeros(4)}
    first = collect(state)
    assert collect(state).places() == first.places()
    state["a"] = state["a"].clone()
    assert collect(state).places() != first.places()
    assert collect(state).geometry() == first.geometry()


def test_a_module_offers_parameters_and_persistent_buffers() -> None:
    module = nn.BatchNorm1d(4)
    module.register_buffer("volatile", torch.zeros(2), persistent=False)
    assert set(named_values(module)) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_or_distributed_wrapper_leaves_no_mark_on_the_names() -> None:
    assert set(named_values(torch.compile(nn.Linear(2, 2)))) == {"weight", "bias"}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: {"w": torch.empty(2, device="meta")}, r"w is on the meta device.*load or initialise"),
        (lambda: {"w": torch.eye(3).to_sparse()}, r"w has layout torch.sparse_coo.*to_dense"),
        (lambda: {"w": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)}, r"w is quantized.*dequantize"),
        (lambda: {"w": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, r"w (has layout|is a)"),
        (lambda: {"w": torch.ones(2, dtype=torch.complex64).conj()}, r"w is a lazy conjugate.*resolve_conj"),
        (lambda: {"w": 3.0}, r"w is float, expected a torch.Tensor or LocalShard"),
        (lambda: [("w", torch.ones(1)), ("w", torch.ones(1))], r"w comes twice"),
        (lambda: [torch.ones(1)], r"expected \(name, tensor\) pairs.*named_parameters"),
        (lambda: torch.ones(1), r"got Tensor; give an nn.Module"),
        (lambda: "weights", r"got str"),
        (lambda: 7, r"got int"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_sent_is_refused_with_its_name_and_the_remedy(model, message) -> None:
    with pytest.raises(InvalidRequest, match=message):
        collect(model())


def test_a_tensor_subclass_is_refused_with_its_name() -> None:
    class Scaled(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    tensor = torch.Tensor._make_wrapper_subclass(Scaled, (2,), dtype=torch.float32)
    with pytest.raises(InvalidRequest, match="w is a Scaled"):
        collect({"w": tensor})


def test_a_checkpoint_of_one_file_and_one_with_an_index_are_read(tmp_path) -> None:
    one, two = {"a": torch.randn(3)}, {"b": torch.randn(2, 2)}
    save_file(one | two, tmp_path / "model.safetensors")
    assert read_checkpoint(tmp_path).keys() == read_checkpoint(tmp_path / "model.safetensors").keys() == {"a", "b"}
    parts = tmp_path / "parts"
    parts.mkdir()
    save_file(one, parts / "x-1.safetensors")
    save_file(two, parts / "x-2.safetensors")
    index = {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    (parts / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_checkpoint(parts)
    assert torch.equal(found["a"], one["a"])
    assert torch.equal(found["b"], two["b"])


def test_a_checkpoint_that_is_not_whole_is_refused_with_the_file(tmp_path) -> None:
    with pytest.raises(InvalidRequest, match="does not exist"):
        read_checkpoint(tmp_path / "nowhere")
    with pytest.raises(InvalidRequest, match="no safetensors file"):
        read_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    with pytest.raises(InvalidRequest, match=r"model\.safetensors cannot be read"):
        read_checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(InvalidRequest, match="not there"):
        read_checkpoint(tmp_path)
    index.write_text("[]")
    with pytest.raises(InvalidRequest, match="no index"):
        read_checkpoint(tmp_path)
