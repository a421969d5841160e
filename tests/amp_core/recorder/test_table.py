"""What a row of the table says."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from amp_core.recorder import Record, table
from tests.amp_core.recorder.recording import entry


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
