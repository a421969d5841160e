from __future__ import annotations

import numpy as np
import pytest

from halfserve.serve.engine.caching.response_cache import (
    ENTRY_BYTES,
    MOST_OF_CACHE,
    OUTPUT_BYTES,
    CachedAnswer,
    RequestKey,
    ResponseCache,
)
from halfserve.serve.engine.requests import Answer, BatchOutputs, RemarkedAnswer

Home = dict[RequestKey, CachedAnswer]


def key(number: int) -> RequestKey:
    return b"form", bytes([number])


def answer(value: float, size: int = 1) -> Answer:
    batch = BatchOutputs({"y": np.full((3, size), value, np.float32), "z": np.zeros((3, 1), np.int8)})
    return Answer(batch, ("y",), 1, 2)


def test_a_kept_answer_is_a_copy_of_the_rows_that_nobody_can_change() -> None:
    cache, home, given = ResponseCache(2**20), Home(), answer(7)
    assert cache.keep(home, key(0), given)
    given.batch.arrays["y"][:] = 0
    kept = home[key(0)].answer
    assert {name: array.tolist() for name, array in kept.items()} == {"y": [[7.0]]}
    assert isinstance(kept, Answer)
    assert kept.raw("y", 4) == np.float32(7).tobytes()
    with pytest.raises(ValueError, match="read-only"):
        kept["y"][0, 0] = 1


def test_arrays_of_texts_and_without_elements_are_kept_too() -> None:
    cache, home = ResponseCache(2**20), Home()
    texts = np.array([[b"\xff\xd8", "text"]], object)
    assert cache.keep(home, key(0), {"t": texts, "empty": np.empty((0, 3), np.float16)})
    kept = home[key(0)].answer
    assert (kept["t"].tolist(), kept["empty"].shape) == ([[b"\xff\xd8", "text"]], (0, 3))
    assert cache.size > len(b"\xff\xd8text") + ENTRY_BYTES


def test_the_least_recently_used_answers_go_first() -> None:
    cache, home, other = ResponseCache(MOST_OF_CACHE * (ENTRY_BYTES + OUTPUT_BYTES + 100)), Home(), Home()
    for number in range(MOST_OF_CACHE):
        assert cache.keep(home if number else other, key(number), answer(number))
    cache.use(other[key(0)])
    cache.keep(home, key(100), answer(0, size=20))
    assert (key(0) in other, key(1) in home, key(100) in home, cache.evictions) == (True, False, True, 1)
    assert cache.size == sum(cached.size for cached in (*home.values(), *other.values()))


def test_both_parts_of_a_key_count_as_held() -> None:
    cache, home = ResponseCache(80_000), Home()
    for form, content in ((b"f" * 4000, b"c"), (b"f", b"c" * 4000)):
        before = cache.size
        assert cache.keep(home, (form, content), answer(0))
        assert cache.size - before >= 4000 + ENTRY_BYTES
    assert not cache.keep(home, (b"f" * 20_000, b"c"), answer(0))


def test_an_answer_as_large_as_an_eighth_is_not_kept() -> None:
    cache, home = ResponseCache(80_000), Home()
    assert not cache.keep(home, key(0), answer(0, size=2500))
    assert cache.keep(home, key(1), answer(0, size=2000))
    assert list(home) == [key(1)]


def test_an_answer_that_says_how_it_was_computed_is_not_kept() -> None:
    cache, home = ResponseCache(2**20), Home()
    assert not cache.keep(home, key(0), RemarkedAnswer({"y": np.zeros(1)}, {"halfserve.precision": "fp32"}))
    assert (cache.size, home) == (0, {})


def test_what_is_kept_again_replaces_what_was_there() -> None:
    cache, home = ResponseCache(2**20), Home()
    cache.keep(home, key(0), answer(1))
    size = cache.size
    cache.keep(home, key(0), answer(2))
    assert (cache.size, home[key(0)].answer["y"].tolist()) == (size, [[2.0]])


def test_a_forgotten_model_holds_nothing_and_leaves_the_others_alone() -> None:
    cache, home, other = ResponseCache(2**20), Home(), Home()
    for number in range(4):
        cache.keep(home if number else other, key(number), answer(number))
    cache.forget(home)
    assert (home, list(other), cache.size) == ({}, [key(0)], other[key(0)].size)
    cache.forget(other)
    assert cache.size == 0
