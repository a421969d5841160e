from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.benchmark.errors import BenchmarkArgumentError
from serve.benchmark.loads import Load, parse_concurrencies, parse_rates


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("1, 4,16", [1, 4, 16]),
        ("7", [7]),
        ("1:64:x2", [1, 2, 4, 8, 16, 32, 64]),
        ("1:60:x2", [1, 2, 4, 8, 16, 32]),
        ("10:30:10", [10, 20, 30]),
        ("3:5", [3, 4, 5]),
        ("1,8:16:4", [1, 8, 12, 16]),
        ("2:2:x3", [2]),
    ],
)
def test_lists_and_ranges(text: str, levels: list[int]) -> None:
    assert parse_concurrencies(text) == levels
    assert parse_rates(text) == levels


def test_rates_may_have_fractions() -> None:
    assert parse_rates("0.5,1:2:0.5,1:10:x2.5") == [0.5, 1, 1.5, 2, 1, 2.5, 6.25]


@given(st.integers(1, 1000), st.integers(0, 1000), st.integers(2, 9))
def test_a_range_stays_within_its_ends(low: int, more: int, factor: int) -> None:
    levels = parse_concurrencies(f"{low}:{low + more}:x{factor}")
    assert levels[0] == low
    assert levels[-1] <= low + more < levels[-1] * factor


@pytest.mark.parametrize("text", ["", "0", "1,,2", "-1", "1.5", "x", "1:3:1.5", "²", "1;2", "nan", "inf", "1e3"])
def test_what_is_no_list_of_concurrencies(text: str) -> None:
    with pytest.raises(BenchmarkArgumentError, match=f"--concurrency {text}: expected numbers above 0 with commas between"):
        parse_concurrencies(text)


@pytest.mark.parametrize("text", ["0:4", "5:1", "1:9:0", "1:8:x1", f"1:{'9' * 400}", f"1:2:{'9' * 400}"])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(BenchmarkArgumentError, match=f"--rate {text}: expected LOW:HIGH:STEP or LOW:HIGH:xFACTOR"):
        parse_rates(text)


def test_a_rate_has_an_end() -> None:
    with pytest.raises(BenchmarkArgumentError, match="expected numbers above 0 with commas between"):
        parse_rates("9" * 400)


def test_a_range_is_no_way_to_fill_the_memory() -> None:
    with pytest.raises(BenchmarkArgumentError, match="--rate 1:1000000000:1: is 1000000000 levels, expected at most 1000"):
        parse_rates("1:1000000000:1")


def test_loads_say_what_they_are() -> None:
    assert (Load(concurrency=16).text, Load(rate=2500.0).text) == ("16 in flight", "2500 requests/s")
