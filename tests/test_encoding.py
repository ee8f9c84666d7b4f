"""The binary forms: what goes in comes out, and what is cut, altered or foreign is refused."""

from __future__ import annotations

import pytest

from fake_plane import MANIFEST, plan_of
from vllm_nixl_plugin.encoding import (
    decode_credit,
    decode_landed,
    decode_plan,
    decode_plans,
    encode_credit,
    encode_landed,
    encode_plan,
    encode_plans,
    plan_digest,
)
from vllm_nixl_plugin.errors import InvalidRequest
from vllm_nixl_plugin.wire import Credit, Group, Landed, PlannedWorker

LANDED = Landed(update_id="00112233445566778899aabbccddeeff", sequence=7, nbytes=1 << 40, plan="0123456789abcdef")
GOLDEN = "4e584c4401" + LANDED.update_id + "07000000" + "0000000000010000" + LANDED.plan


def fleet() -> bytes:
    plans = [plan_of(MANIFEST, worker) for worker in range(4)]
    workers = tuple(PlannedWorker(worker=i, plan=plan_digest(p), incarnation=f"i{i}") for i, p in enumerate(plans))
    return encode_plans(workers, {plan_digest(p): encode_plan(p) for p in plans})


def test_a_notification_has_these_very_bytes() -> None:
    assert encode_landed(LANDED).hex() == GOLDEN
    assert decode_landed(encode_landed(LANDED)) == LANDED


def test_a_notification_for_a_group_has_that_behind_it() -> None:
    grouped = LANDED.model_copy(update={"group": 258})
    assert encode_landed(grouped).hex() == GOLDEN.replace("4e584c44", "4e584c47") + "02010000"
    assert decode_landed(encode_landed(grouped)) == grouped


def test_a_credit_has_these_very_bytes() -> None:
    credit = Credit(update_id=LANDED.update_id, group=258, plan=LANDED.plan)
    assert encode_credit(credit).hex() == "4e58435201" + LANDED.update_id + "02010000" + LANDED.plan
    assert decode_credit(encode_credit(credit)) == credit
    for data in (b"", encode_credit(credit)[:-1], b"X" + encode_credit(credit)[1:]):
        with pytest.raises(InvalidRequest):
            decode_credit(data)


def test_a_plan_with_groups_survives_and_one_whose_groups_leave_a_destination_out_is_refused() -> None:
    plan = plan_of(MANIFEST, 0)
    group = Group(destinations=(0,), window_nbytes=256, working_nbytes=7)
    grouped = plan.model_copy(update={"groups": (group,)})
    assert decode_plan(encode_plan(grouped)) == grouped
    assert plan_digest(grouped) != plan_digest(plan)
    for wrong in ((), (0, 0), (1,)):
        bad = plan.model_copy(update={"groups": (group.model_copy(update={"destinations": wrong}),)})
        with pytest.raises(InvalidRequest, match="groups"):
            decode_plan(encode_plan(bad))


@pytest.mark.parametrize("data", [b"", b"hello", encode_landed(LANDED)[:-1], b"X" + encode_landed(LANDED)[1:]])
def test_other_notifications_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_landed(data)


def test_a_plan_survives_its_binary_form_and_its_digest_is_that_of_the_bytes() -> None:
    plan = plan_of(MANIFEST, 0)
    assert decode_plan(encode_plan(plan)) == plan
    assert plan_digest(decode_plan(encode_plan(plan))) == plan_digest(plan)


def test_plans_that_workers_share_travel_once() -> None:
    workers, plans = decode_plans(fleet())
    assert [w.worker for w in workers] == [0, 1, 2, 3]
    assert len(plans) == 2
    assert plans[workers[1].plan] == plan_of(MANIFEST, 1)


def test_plans_that_are_cut_or_altered_anywhere_are_refused() -> None:
    data = fleet()
    for end in range(len(data)):
        with pytest.raises(InvalidRequest):
            decode_plans(data[:end])
    with pytest.raises(InvalidRequest):
        decode_plans(data + b"\x00")
    altered = bytearray(data)
    altered[-1] ^= 1
    with pytest.raises(InvalidRequest):
        decode_plans(bytes(altered))
