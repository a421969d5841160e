"""The choice of a member, without servers."""

from __future__ import annotations

from collections import Counter

import pytest

from halfserve.protos.cluster_pb2 import Directory
from halfserve.serve.client.cluster.members import Members
from halfserve.serve.client.errors import Overloaded, ServerUnavailable, Unsupported
from tests.serve.client.cluster.cluster import DRAINING, SERVING, member

A, B, C = "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"
ELSEWHERE = "192.0.2.1:1"  # TEST-NET-1: no machine has it


@pytest.fixture
def closed() -> list[str]:
    return []


@pytest.fixture
def members(closed: list[str]) -> Members:
    """Three members; a channel is stood for by its address."""
    made = Members(str, closed.append)
    made.take(Directory(members=[member(A), member(B), member(C)]))
    return made


def picked(members: Members, model: str = "mlp", calls: int = 60) -> Counter[str]:
    """How many of so many simultaneous calls each member gets."""
    return Counter(members.pick(model).address for _ in range(calls))


def test_simultaneous_calls_are_spread_evenly(members: Members) -> None:
    counts = picked(members, calls=300)
    assert counts.keys() == {A, B, C}
    assert max(counts.values()) - min(counts.values()) < 20  # the bound of two choices is log log n; chance alone gives 50


def test_a_busy_member_gets_nothing_while_others_are_free(members: Members) -> None:
    busy = next(one for one in iter(lambda: members.pick("mlp"), None) if one.address == A)
    busy.outstanding += 1000
    assert A not in picked(members)


def test_a_model_is_asked_where_it_is_served(members: Members) -> None:
    members.take(Directory(members=[member(A), member(B, models=["big"]), member(C, models=["big", "mlp"])]))
    assert picked(members, "big").keys() == {B, C}
    assert picked(members, "").keys() == {A, B, C}
    assert picked(members, "loaded a moment ago").keys() == {A, B, C}


def test_draining_members_get_nothing_new(members: Members) -> None:
    members.take(Directory(members=[member(A, DRAINING), member(B), member(C)]))
    assert picked(members).keys() == {B, C}
    members.take(Directory(members=[member(A, DRAINING)]))
    with pytest.raises(ServerUnavailable, match="no member of the cluster takes requests now; 1 are about to leave"):
        members.pick("mlp")


@pytest.mark.parametrize("failure", [ServerUnavailable("lost"), Overloaded("full")])
def test_a_member_that_failed_is_avoided_while_there_are_others(
    members: Members, failure: ServerUnavailable | Overloaded
) -> None:
    one = members.pick("mlp")
    members.settle(one, failure)
    assert one.address not in picked(members)
    assert members.has_other("mlp")
    members.take(Directory(members=[member(one.address)]))
    assert not members.has_other("mlp")
    assert members.pick("mlp").address == one.address


def test_one_call_at_a_time_finds_out_whether_a_lost_member_is_back(members: Members) -> None:
    lost = members.pick("mlp")
    members.settle(lost, Overloaded("full", retry_after_s=1e-9))  # avoided for no time
    assert picked(members)[lost.address] == 1
    members.settle(lost)
    assert picked(members)[lost.address] > 1


def test_a_member_that_left_is_closed_once_its_calls_are_answered(members: Members, closed: list[str]) -> None:
    calls = [members.pick("mlp") for _ in range(60)]
    members.take(Directory(members=[member(B)]))
    assert closed == []
    *others, last = [call for call in calls if call.address == A]
    for call in others:
        members.settle(call)
    assert closed == []
    members.settle(last)
    assert closed == [A]
    assert picked(members).keys() == {B}


def test_a_successor_at_the_same_address_has_a_connection_of_its_own(members: Members, closed: list[str]) -> None:
    members.take(Directory(members=[member(A)]))
    members.settle(members.pick("mlp"))
    successor = member(A)
    successor.id = "successor"
    members.take(Directory(members=[successor]))
    assert closed == [A]
    assert members.pick("mlp").channel == A


def test_shared_memory_stays_with_one_member_of_this_machine(members: Members) -> None:
    members.take(Directory(members=[member(ELSEWHERE), member(A), member(B)]))
    first = members.pick("", shared=True)
    assert first.address in {A, B}
    assert {members.pick("mlp", shared=True) for _ in range(20)} == {first}
    members.take(Directory(members=[member(ELSEWHERE), member(A if first.address == B else B)]))
    assert members.pick("mlp", shared=True) is not first  # as its memory is gone
    members.take(Directory(members=[member(ELSEWHERE)]))
    with pytest.raises(Unsupported, match="a member of the cluster that serves model 'mlp' on this machine, and there is none"):
        members.pick("mlp", shared=True)


def test_a_member_that_comes_back_keeps_its_connection(members: Members, closed: list[str]) -> None:
    before = {members.pick("mlp") for _ in range(60)}
    for state in (DRAINING, SERVING):
        members.take(Directory(members=[member(address, state) for address in (A, B, C)]))
    assert {members.pick("mlp") for _ in range(60)} == before
    assert closed == []


def test_the_steps_of_a_sequence_stay_with_one_member(members: Members) -> None:
    def step(sequence: bytes, *, starts: bool = False, ends: bool = False) -> str:
        return members.pick_for_sequence("mlp", sequence, starts=starts, ends=ends).address

    first = {sequence: step(sequence, starts=True) for sequence in (b"%d" % number for number in range(30))}
    assert set(first.values()) == {A, B, C}
    members.take(Directory(members=[member(A, DRAINING), member(B), member("127.0.0.1:4")]))
    for sequence, address in first.items():
        again = {step(sequence) for _ in range(3)}
        assert again == {address} if address != C else again <= {B, "127.0.0.1:4"}  # C has left, and the state with it
    assert A not in {step(sequence, starts=True) for sequence in first}  # which begin again


def test_a_sequence_that_has_ended_may_go_anywhere(members: Members) -> None:
    def steps(*, ends: bool = False) -> set[str]:
        return {members.pick_for_sequence("mlp", b"%d" % number, starts=False, ends=ends).address for number in range(30)}

    members.take(Directory(members=[member(A)]))
    assert steps() == {A}
    members.take(Directory(members=[member(A), member(B)]))
    assert steps(ends=True) == {A}
    assert steps() == {B}  # the less loaded
