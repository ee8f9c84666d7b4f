"""Plans from traced pieces: coverage, refusals with names, fills and the fallback."""

from __future__ import annotations

import pytest
import torch

from vllm_nixl_plugin.encoding import decode_plan, encode_plan
from vllm_nixl_plugin.errors import PlanRefused
from vllm_nixl_plugin.layout import identity
from vllm_nixl_plugin.planning import TracedDestination, check_against_checkpoint, make_plan, missing
from vllm_nixl_plugin.tracing import Constant, Creation, Opaque, Piece, Source, Tracer
from vllm_nixl_plugin.wire import Manifest, WeightSpec

BF16 = torch.bfloat16


def spec(name: str, *shape: int, dtype: str = "bfloat16") -> WeightSpec:
    return WeightSpec(name=name, shape=shape, dtype=dtype)


def manifest(*weights: WeightSpec, partial: bool = False) -> Manifest:
    return Manifest(weights=weights, partial=partial)


def fused(*names: str, rows: int = 2, padding: int = 0) -> TracedDestination:
    """A destination of ``rows`` rows of 4 per name, as a fused projection has, and rows that nothing writes."""
    target = torch.empty(rows * len(names) + padding, 4, dtype=BF16)
    tracer = Tracer()
    stand_in = tracer.stand_ins({"fused": target})["fused"]
    with tracer:
        for i, name in enumerate(names):
            stand_in.narrow(0, rows * i, rows).copy_(tracer.source(name, (rows, 4), BF16))
    return TracedDestination(1, ("fused",), target.nbytes, True, tuple(tracer.pieces(stand_in)))


def test_every_source_piece_becomes_a_copy_and_the_plan_survives_the_wire():
    planned = make_plan(manifest(spec("q", 2, 4), spec("k", 2, 4)), [fused("q", "k")], None, ())
    plan = planned.plan
    assert plan.nbytes == 32
    assert [c.weight for c in plan.copies] == [0, 1]
    assert plan.destinations[0].home == "live"
    assert decode_plan(encode_plan(plan)) == plan
    assert plan.unused == ()


def test_a_missing_weight_is_refused_by_name():
    baseline = {1: fused("q", "k").pieces}
    with pytest.raises(PlanRefused, match="k") as refused:
        make_plan(manifest(spec("q", 2, 4)), [fused("q", padding=2)], baseline, ())
    assert refused.value.details["missing"] == ["k"]


def test_other_names_that_write_the_same_bytes_miss_nothing():
    assert missing({1: fused("q", "k").pieces}, {1: fused("qk", rows=4).pieces}) == set()


def test_a_part_of_a_weight_that_is_not_written_is_missing_too():
    assert missing({1: fused("qk", rows=4).pieces}, {1: fused("q", padding=2).pieces}) == {"qk"}


def test_a_weight_that_the_loader_leaves_is_unused_unless_the_servers_own_checkpoint_has_it_too():
    weights = manifest(spec("q", 2, 4), spec("inv_freq", 4), spec("extra", 4))
    planned = make_plan(weights, [fused("q")], None, ["inv_freq"])
    assert planned.plan.unused == ("extra",)


def test_bytes_that_no_weight_writes_are_fills_of_creation_or_constants():
    target = torch.empty(6, 4)
    tracer = Tracer()
    stand_in = tracer.stand_ins({"p": target})["p"]
    with tracer:
        stand_in[:2].copy_(tracer.source("w", (2, 4), torch.float32))
        stand_in[2:3].fill_(7)
    destination = TracedDestination(1, ("p",), target.nbytes, False, tuple(tracer.pieces(stand_in)))
    planned = make_plan(manifest(spec("w", 2, 4, dtype="float32")), [destination], None, ())
    assert {(f.value, f.copy.dst_nbytes) for f in planned.fills[0]} == {(7, 16), (None, 48)}
    assert planned.plan.destinations[0].home == "shadow"


def test_sources_of_opaque_pieces_are_sent_whole_for_vllms_own_loader():
    pieces = (Piece(Opaque("aten.exp", frozenset({"a"})), identity((4,), 4)),)
    destination = TracedDestination(5, ("A",), 16, True, pieces)
    planned = make_plan(manifest(spec("a", 4, dtype="float32")), [destination], None, ())
    plan = planned.plan
    assert plan.fallback == ("a",)
    assert [d.home for d in plan.destinations] == ["shadow", "source"]
    assert planned.keys == (5, "a")
    assert plan.nbytes == 16
    assert plan.unused == ()


def test_shapes_and_types_are_compared_with_the_servers_checkpoint():
    checkpoint = [spec("a", 4), spec("b", 4), spec("c", 4, dtype="float8_e4m3fn"), spec("d", 4, dtype="float32")]
    check_against_checkpoint(manifest(spec("a", 4), spec("d", 4), spec("new", 9)), checkpoint)
    with pytest.raises(PlanRefused) as refused:
        check_against_checkpoint(manifest(spec("b", 5), spec("c", 4), spec("d", 4, dtype="int64")), checkpoint)
    assert refused.value.details["misshaped"] == ["b: expected [4], got [5]"]
    assert [m.split(":")[0] for m in refused.value.details["mistyped"]] == ["c", "d"]


def test_a_dtype_that_torch_does_not_have_is_refused_by_name():
    from vllm_nixl_plugin.planning import dtype_of

    with pytest.raises(PlanRefused, match="float3"):
        dtype_of("float3")
    with pytest.raises(PlanRefused, match="manual_seed"):
        dtype_of("manual_seed")


def test_roots_compare_as_the_plan_needs_it():
    assert Source("a") == Source("a")
    assert Creation("p") != Creation("q")
    assert Constant(1.0) != Constant(1.0)
