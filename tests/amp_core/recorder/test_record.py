"""Records: merged, stored, read back, and shown as a table and a picture."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console

from halfserve.amp_core.recorder import Magnitudes, Record, RecordEntry, Recorder, plot, table
from halfserve.amp_core.recorder.record_report import _draw
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


def record_of(found: list[RecordEntry], steps: int = 1) -> Record:
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
    ("values", "text"),
    [
        *((values, "not a record: expected a dict") for values in list[Any]((None, [], "record", {}))),
        (GOOD | {"format": "else"}, "not a record: expected a dict whose 'format' is 'halfserve.record'"),
        (GOOD | {"version": 2}, "the record has version 2; this halfserve reads 1"),
        (GOOD | {"steps": -1}, "expected a whole number of 'steps'"),
        (GOOD | {"steps": True}, "expected a whole number of 'steps'"),
        (GOOD | {"entries": None}, "a list of 'entries'"),
        (GOOD | {"entries": [3]}, "the record is broken: an entry is a int; expected a dict"),
        (GOOD | {"entries": [{}]}, "the record is broken: an entry lacks 'calls'"),
        (GOOD | {"entries": [GOOD["entries"][0] | {"more": 1}]}, "an entry has an unknown 'more'"),
        (GOOD | {"entries": [GOOD["entries"][0] | {"calls": "x"}]}, "'calls' is 'x'; expected a whole number from 0"),
        (
            GOOD | {"entries": [GOOD["entries"][0] | {"largest": float("nan")}]},
            "'largest' is nan; expected a finite number from 0, or None",
        ),
        (GOOD | {"entries": [GOOD["entries"][0] | {"inputs": "float16"}]}, "expected a list of dtype names"),
        (GOOD | {"entries": [GOOD["entries"][0] | {"direction": "up"}]}, "'up'; expected 'forward' or 'backward'"),
        (GOOD | {"entries": [GOOD["entries"][0] | {"direction": []}]}, "expected 'forward' or 'backward'"),
        (GOOD | {"entries": [GOOD["entries"][0] | {"module": None}]}, "'module' is None; expected a text"),
    ],
)
def test_what_is_no_record_is_refused(values: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Record.from_dict(values)


def rows(record: Record, **options: int) -> list[list[str]]:
    console = Console(file=StringIO(), width=160)
    console.print(table(record, **options))
    assert isinstance(console.file, StringIO)
    return [line.split() for line in console.file.getvalue().splitlines() if " fwd " in line or " bwd " in line]


def test_what_ran_where_in_which_dtype_and_range() -> None:
    found = entry("encoder.0", calls=1234, largest=2.5, smallest=0.001, dtype="bfloat16", inputs=("bfloat16", "bfloat16"))
    assert rows(Record(entries=(found,))) == [["encoder.0", "mm", "fwd", "bf16", "1,234", "1.0e-03", "2.5e+00", "-", "-"]]


def test_dtypes_outputs_and_places() -> None:
    norm = entry("", op="aten.native_layer_norm.default", output=2, inputs=("float16", "float32"), dtype="float32")
    made = entry(".", op="mine.made.default", inputs=(), dtype="float64")
    first, second = rows(Record(entries=(norm, made)))
    assert first[:6] == ["(outside)", "native_layer_norm", "[2]", "fwd", "fp16", "fp32>fp32"]
    assert second[:4] == ["(model)", "mine.made", "fwd", ">fp64"]


def test_what_is_risky_comes_first_and_the_rest_as_it_ran() -> None:
    fine = [entry(f"layer{i}") for i in range(60)]
    small = entry("small", elements=10**6, underflow=1)
    huge = entry("huge", direction="backward", elements=4, overflow=1)
    found = rows(Record(entries=(*fine, small, huge)), limit=4)
    assert [row[0] for row in found] == ["huge", "small", "layer0", "layer1"]
    assert found[0][-2:] == ["25.00", "-"]
    assert found[1][-2:] == ["-", "<0.01"]


def layers_record(layers: int, **values: Any) -> Record:
    found = []
    for i in range(layers):
        name = f"model.encoder.layers.{i}.self_attention.output_projection"
        found.append(entry(name, largest=2.0**i, smallest=2.0**-i, **values))
        gradients: dict[str, Any] = {"largest": 2.0**-i, "smallest": 2.0 ** (-i - 8)}
        unscaled: dict[str, Any] = {"unscaled_largest": 2.0 ** (-i - 4), "unscaled_smallest": 2.0 ** (-i - 12)}
        found.append(entry(name, direction="backward", **gradients, **unscaled))
    return Record(entries=tuple(found), steps=2)


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_the_ending_chooses_the_format(tmp_path: Path, ending: str, start: bytes) -> None:
    plot(layers_record(3), tmp_path / f"range.{ending}")
    assert (tmp_path / f"range.{ending}").read_bytes().startswith(start)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["range.bmp", "range"])
def test_another_ending_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="expected a file name that ends in .png, .svg or .pdf"):
        plot(layers_record(3), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_picture_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_figure: Figure, file: Any, **_options: Any) -> None:
        file.write(b"half a picture")
        raise OSError("disk full")

    (tmp_path / "range.png").write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        plot(layers_record(1), tmp_path / "range.png")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("range.png", b"old")]


@pytest.mark.parametrize("layers", [1, 3, 60])
def test_names_neither_overlap_nor_leave_the_picture(layers: int) -> None:
    figure = _draw(layers_record(layers), 120)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert len(boxes) == layers
    assert all(upper.y0 >= lower.y1 for upper, lower in pairwise(boxes))
    assert min(box.x0 for box in boxes) >= 0
    limits = [text.get_window_extent() for text in axes.texts]
    assert len(limits) == 3
    assert all(left.x1 < right.x0 for left, right in pairwise(limits))
    title = figure.get_suptitle()
    assert title == "Ranges in 2 recorded steps, against float16"


def test_bars_show_the_ranges_and_the_axis_holds_them() -> None:
    figure = _draw(layers_record(40, non_finite=1), 120)
    (axes,) = figure.axes
    forward, backward = axes.containers
    assert [bar.get_x() for bar in forward][2] == 0.25
    assert [bar.get_x() + bar.get_width() for bar in backward][1] == 0.5
    low, high = axes.get_xlim()
    assert low < 2.0**-51  # of the gradients without their scale
    assert high > 2.0**39
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {
        *("forward", "backward, as it ran", "backward without the loss scale", "forward: infinite or NaN too")
    }


def test_of_many_modules_those_nearest_the_limits_are_drawn() -> None:
    figure = _draw(layers_record(16), 4)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [label.partition("…")[0].split(".")[3] for label in labels] == ["12", "13", "14", "15"]
    assert figure.get_suptitle().endswith("the 4 of 16 modules nearest its limits")


def test_an_empty_record_says_so(tmp_path: Path) -> None:
    (text,) = (text.get_text() for text in _draw(Record(), 120).axes[0].texts if "nothing" in text.get_text())
    assert text == "nothing was recorded"
    plot(Record(), tmp_path / "range.png")


@pytest.mark.long
def test_matplotlib_is_imported_only_to_draw() -> None:
    code = "import sys, halfserve.amp_core.recorder; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
