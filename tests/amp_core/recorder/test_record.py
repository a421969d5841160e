"""A record can be stored, read back, merged and asked."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_core.recorder import Entry, Magnitudes, Record, Recorder
from tests.amp_core.recorder.recording import Block, entry

counts = st.integers(0, 9)
magnitude = st.none() | st.floats(2.0**-30, 2.0**30)
entries = st.builds(
    entry,
    module=st.sampled_from(["", ".", "a", "a.b"]),
    op=st.sampled_from(["aten.mm.default", "aten.exp.default"]),
    direction=st.sampled_from(["forward", "backward"]),
    calls=st.integers(1, 5),
    elements=counts,
    zeros=counts,
    non_finite=counts,
    overflow=counts,
    underflow=counts,
    subnormal=counts,
    largest=magnitude,
    smallest=magnitude,
    unscaled_largest=magnitude,
    unscaled_smallest=magnitude,
)


def record_of(found: list[Entry], steps: int = 1) -> Record:
    """A record in which each key comes once, as recorders make it."""
    return Record(steps=steps).merged(Record(entries=tuple(found)))


records = st.builds(record_of, st.lists(entries, max_size=6), st.integers(0, 3))


@given(record=records)
def test_it_comes_back_from_json_and_from_a_checkpoint(record: Record) -> None:
    assert Record.from_dict(json.loads(json.dumps(record.to_dict(), allow_nan=False))) == record
    file = io.BytesIO()
    torch.save(record.to_dict(), file)
    file.seek(0)
    assert Record.from_dict(torch.load(file, weights_only=True)) == record


@given(one=records, two=records, three=records)
def test_merging_is_associative_and_loses_nothing(one: Record, two: Record, three: Record) -> None:
    assert one.merged(two).merged(three) == one.merged(two.merged(three))
    assert one.merged(Record()) == one == Record().merged(one)
    merged = one.merged(two)
    assert merged.steps == one.steps + two.steps
    assert len({found.key for found in merged.entries}) == len(merged.entries)
    assert sum(found.calls for found in merged.entries) == sum(found.calls for found in (*one.entries, *two.entries))


def test_the_record_of_both_parts_is_the_merged_record() -> None:
    model = Block()
    whole, first, second = (Recorder(model, every=1) for _ in range(3))
    with whole.step(1):
        for recorder, factor in ((first, 1.0), (second, 1e-4)):
            with recorder.step(1):
                model(torch.full((2, 4), factor, requires_grad=True)).sum().backward()
            model.zero_grad()
    assert whole.record().entries == first.record().merged(second.record()).entries


def test_the_riskiest_comes_first() -> None:
    fine = entry("fine", elements=10, subnormal=10)
    below = entry("below", elements=10, underflow=9)
    above = entry("above", elements=100, overflow=1)
    broken = entry("broken", elements=10, non_finite=1, underflow=2)
    assert record_of([fine, below, above, broken]).risky() == (broken, above, below)


def test_the_ranges_of_modules() -> None:
    record = record_of(
        [
            entry("a", elements=2, largest=8.0, smallest=1.0),
            entry("a", op="aten.exp.default", elements=3, largest=4.0, smallest=0.5),
            entry(
                "a", direction="backward", elements=1, largest=2.0, smallest=2.0, unscaled_largest=1.0, unscaled_smallest=0.5
            ),
            entry("b", direction="backward"),
        ]
    )
    assert record.ranges("forward") == {"a": Magnitudes(elements=5, largest=8.0, smallest=0.5)}
    assert record.ranges("backward") == {"a": Magnitudes(elements=1, largest=2.0, smallest=2.0), "b": Magnitudes()}
    assert record.unscaled_gradients() == {"a": (0.5, 1.0)}


def test_modules_come_in_the_order_in_which_they_ran() -> None:
    ran = [entry("a"), entry("a.b"), entry("c"), entry("")]
    record = record_of([*ran, *(entry(path, direction="backward") for path in ("", "c", "a.x", "z"))])
    assert record.modules() == ("a", "a.x", "a.b", "c", "", "z")


GOOD = record_of([entry(elements=1, largest=1.0, smallest=1.0)]).to_dict()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "else"}, "not a record: expected a dict whose 'format' is 'halfserve.record'"),
        ({"version": 2}, "the record has version 2; this halfserve reads 1"),
        ({"steps": -1}, "expected a whole number of 'steps'"),
        ({"steps": True}, "expected a whole number of 'steps'"),
        ({"entries": None}, "a list of 'entries'"),
        ({"entries": [3]}, "the record is broken: an entry is a int; expected a dict"),
        ({"entries": [{}]}, "the record is broken: an entry lacks 'calls'"),
        ({"entries": [GOOD["entries"][0] | {"more": 1}]}, "an entry has an unknown 'more'"),
        ({"entries": [GOOD["entries"][0] | {"calls": "x"}]}, "'calls' is 'x'; expected a whole number from 0"),
        (
            {"entries": [GOOD["entries"][0] | {"largest": float("nan")}]},
            "'largest' is nan; expected a finite number from 0, or None",
        ),
        ({"entries": [GOOD["entries"][0] | {"inputs": "float16"}]}, "expected a list of dtype names"),
        ({"entries": [GOOD["entries"][0] | {"direction": "up"}]}, "'up'; expected 'forward' or 'backward'"),
        ({"entries": [GOOD["entries"][0] | {"direction": []}]}, "expected 'forward' or 'backward'"),
        ({"entries": [GOOD["entries"][0] | {"module": None}]}, "'module' is None; expected a text"),
    ],
)
def test_what_is_no_record_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Record.from_dict(GOOD | change)


@pytest.mark.parametrize("values", [None, [], "record", {}])
def test_what_is_not_even_near_is_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="not a record: expected a dict"):
        Record.from_dict(values)
