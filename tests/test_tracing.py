"""The tracer: what it records, carried out on real tensors, gives what the function gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay import replay
from vllm_nixl_plugin.tracing import Constant, Creation, NeedsData, Opaque, Source, Tracer, trace_function

BF16, F32 = torch.bfloat16, torch.float32


def check(function, **sources):
    """Trace a function of named tensors and compare the replay of each output with the function run on data."""
    traced = trace_function(function, {n: (t.shape, t.dtype) for n, t in sources.items()})
    expected = function(dict(sources))
    assert set(traced) == set(expected)
    for name, (shape, dtype, pieces) in traced.items():
        want = expected[name]
        assert (tuple(want.shape), want.dtype) == (shape, dtype)
        got = torch.zeros(shape, dtype=dtype)
        replay(pieces, sources, got)
        assert torch.equal(got, want), name
    return traced


def rand(*shape, dtype=F32):
    return torch.randn(*shape).to(dtype)


VIEWS = {
    "narrow": lambda d: d["a"].narrow(0, 1, 3),
    "chunk": lambda d: d["a"].chunk(2, dim=1)[1],
    "split": lambda d: torch.split(d["a"], [1, 5], dim=1)[1],
    "transpose": lambda d: d["a"].T,
    "index": lambda d: d["a"][2],
    "step": lambda d: d["a"][::2, 1::3],
    "reshape": lambda d: d["a"].reshape(2, 2, 6).permute(2, 0, 1),
    "reshape after transpose": lambda d: d["a"].t().reshape(3, 8),
    "unflatten": lambda d: d["a"].unflatten(1, (3, 2))[:, 1],
    "cat": lambda d: torch.cat([d["a"][1:], d["a"][:1]]),
    "stack": lambda d: torch.stack([d["a"][0], d["a"][3]], dim=1),
    "expand": lambda d: d["a"][:, :1].expand(4, 5).contiguous(),
    "cast": lambda d: d["a"].to(BF16),
    "cast twice": lambda d: d["a"].to(BF16).to(F32),
    "negate and scale": lambda d: -d["a"] * 2.5,
    "cast then add": lambda d: d["a"].to(BF16) + 1,
    "in-place arithmetic on a copy": lambda d: d["a"].clone().mul_(3).sub_(1),
    "bytes of another dtype": lambda d: d["a"].view(torch.int16)[:, ::2],
    "rows": lambda d: d["a"][torch.tensor([2, 3, 0, 0, -1])],
    "columns": lambda d: d["a"][:, torch.tensor([5, 1, 2, 3])] * 2,
    "no rows": lambda d: d["a"][torch.tensor([], dtype=torch.int64)],
    "clone of a view": lambda d: d["a"][1:3].clone().t().contiguous(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_replaying_a_trace_gives_what_the_function_gives(name):
    check(lambda d: {"out": VIEWS[name](d)}, a=rand(4, 6))


def test_a_temporary_that_is_reused_does_not_change_what_was_read_before():
    def function(d):
        buffer = torch.empty(4, 6)
        first = torch.empty(4, 6)
        buffer.copy_(d["a"])
        first.copy_(buffer)
        buffer.copy_(d["b"])
        return {"first": first, "second": buffer}

    check(function, a=rand(4, 6), b=rand(4, 6))


def test_real_tensors_of_the_function_become_constants_and_keep_the_values_they_had():
    scale = torch.arange(6.0)

    def function(d):
        out = torch.zeros(5, 6)
        out[:4].copy_(d["a"])
        out[4].copy_(scale)
        return {"out": out}

    traced = check(function, a=rand(4, 6))
    assert any(isinstance(p.root, Constant) for p in traced["out"][2])


def test_the_last_writer_of_a_byte_wins():
    def function(d):
        out = torch.empty(4, 6)
        out.fill_(7)
        out[1:3].copy_(d["a"][:2])
        out[2:, 2:4].copy_(d["b"][:2, :2])
        out[0, 0] = 5
        return {"out": out}

    check(function, a=rand(4, 6), b=rand(4, 6))


def stand_in_of(tensor):
    tracer = Tracer()
    return tracer, tracer.stand_ins({"p": tensor})["p"]


def test_a_destination_that_is_rewritten_from_itself_after_its_copy_is_composed():
    param = torch.nn.Parameter(torch.empty(4), requires_grad=False)
    tracer, p = stand_in_of(param)
    a = tracer.source("a", (4,), F32)
    with tracer, torch.no_grad():
        p.data.copy_(a)
        p.copy_(-p)
    source = rand(4)
    out = torch.zeros(4)
    replay(tracer.pieces(p), {"a": source}, out)
    assert torch.equal(out, -source)


def test_arithmetic_that_may_differ_between_devices_is_opaque_and_names_its_sources():
    traced = trace_function(lambda d: {"out": torch.exp(d["a"])}, {"a": ((4,), F32)})
    (piece,) = traced["out"][2]
    assert isinstance(piece.root, Opaque)
    assert piece.root.sources == {"a"}


def test_an_op_between_two_sources_depends_on_both():
    traced = trace_function(lambda d: {"out": d["a"] @ d["b"]}, {"a": ((2, 3), F32), "b": ((3, 2), F32)})
    (piece,) = traced["out"][2]
    assert isinstance(piece.root, Opaque)
    assert piece.root.sources == {"a", "b"}


@pytest.mark.parametrize(
    "function",
    [lambda a: a[0].item(), lambda a: bool(a.sum() > 0), lambda a: a[a > 0], lambda a: torch.equal(a, a)],
    ids=["item", "bool", "mask", "equal"],
)
def test_asking_for_values_ends_the_trace_and_names_the_source(function):
    with pytest.raises(NeedsData) as error:
        trace_function(lambda d: {"out": torch.ones(1) * function(d["a"])}, {"a": ((4,), F32)})
    assert error.value.sources == {"a"}


def test_traced_tensors_report_the_device_and_class_of_what_they_stand_for():
    class Loaded(torch.nn.Parameter):
        pass

    param = Loaded(torch.empty(3, 4, device="meta"), requires_grad=False)
    param.weight_loader = "loader"
    tracer = Tracer()
    p = tracer.stand_ins({"p": param}, torch.device("cuda", 1))["p"]
    assert isinstance(p, Loaded)
    assert isinstance(p, torch.nn.Parameter)
    assert p.device == torch.device("cuda", 1)
    assert p.is_cuda
    assert not p.is_meta
    assert not p.is_cpu
    assert p.data.device == torch.device("cuda", 1)
    assert p.weight_loader == "loader"
    a = tracer.source("a", (3, 4), F32)
    assert a.device.type == "cpu"
    with tracer:
        assert a.to("cpu", BF16)[1:].device == torch.device("cpu")
        assert p.data[1:].narrow(1, 0, 2).device == torch.device("cuda", 1)


def test_ops_on_real_tensors_run_for_real_while_tracing():
    tracer = Tracer()
    a = tracer.source("a", (8,), F32)
    expert_map = torch.tensor([3, 1, -1])
    with tracer:
        index = expert_map[1].item()
        out = a[index : index + 2].clone()
    assert index == 1
    (piece,) = tracer.read(out)
    assert piece.root == Source("a")
    assert piece.copy.src_offset == 4


def test_aliases_of_one_storage_are_one_destination():
    weight = torch.empty(4, 6)
    tracer = Tracer()
    twins = tracer.stand_ins({"embed": weight, "head": weight, "part": weight[1:3]})
    a = tracer.source("a", (2, 6), F32)
    with tracer:
        twins["part"].copy_(a)
    for name in ("embed", "head"):
        sources = [p for p in tracer.pieces(twins[name]) if isinstance(p.root, Source)]
        (piece,) = sources
        assert piece.copy.dst_offset == 24
        assert piece.copy.dst_nbytes == 48
        assert sum(p.copy.dst_nbytes for p in tracer.pieces(twins[name]) if isinstance(p.root, Creation)) == 48


def test_an_unknown_in_place_op_is_recorded_as_a_write_and_not_lost():
    tracer, p = stand_in_of(torch.empty(4))
    a = tracer.source("a", (4,), F32)
    with tracer:
        p.copy_(a)
        p.clamp_(0, 1)
    (piece,) = tracer.pieces(p)
    assert isinstance(piece.root, Opaque)
    assert piece.root.sources == {"a"}


OPS = st.sampled_from(["narrow", "chunk", "transpose", "step", "clone", "cast", "reshape", "cat", "flip_halves", "neg"])


@given(st.lists(OPS, max_size=6), st.integers(0, 1_000_000))
@settings(max_examples=150, deadline=None)
def test_random_chains_of_views_and_copies_replay_exactly(ops, seed):
    random = torch.Generator().manual_seed(seed)

    def pick(n):
        return int(torch.randint(0, n, (1,), generator=random))

    choices = [pick(1000) for _ in range(20)]

    def function(d):
        t, at = d["a"], iter(choices)
        for op in ops:
            dim = next(at) % max(t.dim(), 1)
            if t.dim() == 0 or t.shape[dim] < 2:
                continue
            half = t.shape[dim] // 2
            if op == "narrow":
                t = t.narrow(dim, next(at) % half, half)
            elif op == "chunk":
                t = t.chunk(2, dim)[next(at) % 2]
            elif op == "transpose":
                t = t.transpose(dim, 0)
            elif op == "step":
                t = t[tuple(slice(next(at) % 2, None, 2) if i == dim else slice(None) for i in range(t.dim()))]
            elif op == "clone":
                t = t.clone()
            elif op == "cast":
                t = t.to(BF16 if t.dtype is F32 else F32)
            elif op == "reshape":
                t = t.reshape(-1)
            elif op == "cat":
                t = torch.cat([t, t], dim)
            elif op == "flip_halves":
                t = torch.cat([t.narrow(dim, half, t.shape[dim] - half), t.narrow(dim, 0, half)], dim)
            elif op == "neg":
                t = -t
        return {"out": t.contiguous()}

    check(function, a=rand(6, 4, 10))


def test_a_function_may_look_at_what_was_made_before_it_but_not_at_what_it_wrote():
    table = torch.tensor([-1, 1, -1, 0], dtype=torch.int32)
    tracer = Tracer()
    stand_ins = tracer.stand_ins({"table": table, "out": torch.empty(2, 6)})
    source = tracer.source("a", (4, 6), F32)
    with tracer:
        seen, out = stand_ins["table"], stand_ins["out"]
        for row in range(4):
            if (at := seen[row].item()) >= 0:
                out[at].copy_(source[row])
        rows = (seen >= 0).nonzero().squeeze(1)
        taken = source[rows]
        table_of_ours = torch.tensor([3.0, 4.0])
        assert table_of_ours[1].item() == 4
        seen[0] = 1
        assert seen[0].item() == 1
        seen[1:2].copy_(source[0, :1])
        with pytest.raises(NeedsData) as need:
            seen[1].item()
        with pytest.raises(NeedsData):
            seen.data_ptr()
    assert need.value.sources == {"a"}
    a = rand(4, 6)
    got = torch.zeros(2, 6)
    replay(tracer.pieces(stand_ins["out"]), {"a": a}, got)
    assert torch.equal(got, a[[3, 1]])
    replay(tracer.read(taken), {"a": a}, got)
    assert torch.equal(got, a[[1, 3]])
