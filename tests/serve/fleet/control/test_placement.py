from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from halfserve.serve.fleet.control.placement import MemberRoom, ModelDemand, Placement, moves, place


def models(*demands: float, size: int = 0) -> list[ModelDemand]:
    return [ModelDemand(name=f"m{i}", demand=demand, size=size) for i, demand in enumerate(demands)]


def rooms(*names: str, memory: int = 0, now: Mapping[str, frozenset[str]] | None = None) -> list[MemberRoom]:
    return [
        MemberRoom(
            id=name, memory_size=memory, serves=frozenset(model for model, members in (now or {}).items() if name in members)
        )
        for name in names
    ]


def zipf(count: int) -> list[ModelDemand]:
    return [ModelDemand(name=f"m{i:03}", demand=2 / (i + 1)) for i in range(count)]


def held(placement: Placement, member: str) -> set[str]:
    return {model for model, members in placement.items() if member in members}


def test_hot_models_have_more_members_and_each_has_one() -> None:
    placement = place(zipf(100), rooms("a", "b", "c", "d"), 30)
    assert all(placement.values())
    assert len(placement["m000"]) == 4
    assert len(placement["m050"]) == 1
    assert all(len(held(placement, member)) <= 30 for member in "abcd")


def test_a_model_that_is_used_a_little_outlives_a_member() -> None:
    placement = place(models(0, 0.01), rooms("a", "b", "c"), 10)
    assert [len(members) for members in placement.values()] == [2, 1]


def test_nothing_moves_while_nothing_changes() -> None:
    members = ("a", "b", "c", "d")
    before = place(zipf(100), rooms(*members), 30)
    for _ in range(3):
        after = place(zipf(100), rooms(*members, now=before), 30)
        assert moves(before, after) <= 2  # to even loads out
        before = after
    assert place(zipf(100), rooms(*members, now=before), 30) == before


def test_noise_in_demand_moves_nothing() -> None:
    members = ("a", "b", "c", "d")
    before = place(zipf(100), rooms(*members), 30)
    for _ in range(5):
        before = place(zipf(100), rooms(*members, now=before), 30)
    noisy = [ModelDemand(name=model.name, demand=model.demand * (1.2 if i % 2 else 0.85)) for i, model in enumerate(zipf(100))]
    assert moves(before, place(noisy, rooms(*members, now=before), 30)) <= 2


def test_a_member_that_leaves_moves_only_what_it_had() -> None:
    before = place(zipf(100), rooms("a", "b", "c", "d"), 40)
    after = place(zipf(100), rooms("a", "b", "c", now=before), 40)
    assert all(after.values())
    assert moves(before, after) <= len(held(before, "d")) + 2


def test_a_member_that_joins_takes_load_without_a_shuffle() -> None:
    before = place(zipf(60), rooms("a", "b", "c"), 30)
    after = place(zipf(60), rooms("a", "b", "c", "d", now=before), 30)
    assert held(after, "d")
    assert moves(before, after) == len(held(after, "d"))


def test_more_models_than_places_are_all_served() -> None:
    placement = place(models(*[0.0] * 10), rooms("a", "b"), 2)
    assert all(len(members) == 1 for members in placement.values())
    assert len(held(placement, "a")) == len(held(placement, "b")) == 5


def test_a_model_that_a_member_refuses_goes_to_another() -> None:
    members = [MemberRoom(id="a", serves=frozenset({"m0"}), refuses=frozenset({"m0"})), MemberRoom(id="b")]
    assert place(models(1.0), members, 5) == {"m0": frozenset({"b"})}
    assert place(models(1.0), members[:1], 5) == {"m0": frozenset()}


def test_a_single_copy_drives_out_spare_ones() -> None:
    now = {"m0": frozenset({"a", "b"}), "m1": frozenset({"a", "b"})}
    placement = place([*models(1.0, 0.5, 0.0, size=50)], rooms("a", "b", memory=100, now=now), 10)
    assert all(placement.values())


PLACES = st.lists(st.tuples(st.floats(0, 4), st.integers(0, 60)), min_size=1, max_size=12)


@settings(max_examples=60)
@given(PLACES, PLACES, st.integers(1, 5), st.integers(1, 8))
def test_memory_suffices_at_every_member(
    first: list[tuple[float, int]], second: list[tuple[float, int]], members: int, most: int
) -> None:
    now: Placement = {}
    for demands in (first, second):
        wanted = [ModelDemand(name=f"m{i}", demand=demand, size=size) for i, (demand, size) in enumerate(demands)]
        sizes = {model.name: model.size for model in wanted}
        now = place(wanted, rooms(*"abcde"[:members], memory=100, now=now), most)
        assert set(now) == set(sizes)
        for member in "abcde"[:members]:
            assert sum(sizes[model] for model in held(now, member)) <= 100
