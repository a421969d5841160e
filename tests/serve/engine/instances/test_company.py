from __future__ import annotations

import weakref

from hypothesis import given
from hypothesis import strategies as st

from serve.engine.instances.company import ALONE_AFTER_S, Company


def test_who_is_alone_is_so_after_a_while() -> None:
    company = Company()
    assert [company.is_alone("a", 5.0 + part * ALONE_AFTER_S) for part in (0, 0.5, 1, 9)] == [False, False, True, True]
    assert not company.is_alone("b", 20.0)
    assert not company.is_alone("a", 20.5)
    assert company.is_alone("a", 20.5 + ALONE_AFTER_S)


def test_who_was_alone_is_not_kept() -> None:
    class Someone:
        pass

    company, someone = Company(), Someone()
    gone = weakref.ref(someone)
    company.is_alone(someone, 1.0)
    del someone
    assert gone() is None


@given(turns=st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, ALONE_AFTER_S / 2)), max_size=50))
def test_nobody_is_alone_within_a_while_of_another(turns: list[tuple[str, float]]) -> None:
    company, now, latest = Company(), 0.0, {"a": -9.0, "b": -9.0}
    for who, gap in turns:
        now += gap
        other = latest["b" if who == "a" else "a"]
        if company.is_alone(who, now):
            assert now - other >= ALONE_AFTER_S
        latest[who] = now
