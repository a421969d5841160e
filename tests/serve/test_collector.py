"""The garbage collector while a server runs."""

from __future__ import annotations

import gc
import weakref

import pytest

from serve.collector import NEW_OBJECTS, seldom_collecting


class Circle:
    """Keeps itself."""

    def __init__(self) -> None:
        self.me = self


def test_it_looks_seldom_and_not_at_what_was_there() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with seldom_collecting():
        assert gc.get_threshold() == (NEW_OBJECTS, *before[1:])
        assert gc.get_freeze_count() > frozen
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_circles_are_found_all_the_same() -> None:
    with seldom_collecting():
        circles = [weakref.ref(Circle()) for _ in range(3 * NEW_OBJECTS)]
        assert circles[0]() is None


def test_an_error_leaves_the_collector_as_it_was() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), seldom_collecting():
        raise KeyError
    assert gc.get_threshold() == before
