from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from halfserve.export.dtype_check.constants import NOTABLE_ERROR
from halfserve.export.dtype_check.finder import find_dtype_leaks
from halfserve.export.dtype_check.findings import Finding, FindingLog, LeakReport, leak_table, totals
from halfserve.export.dtype_check.source_lines import SourceLine, SourceLocator, assigned_at, autocast_region
from halfserve.export.dtype_check.watched_run import Operation
from halfserve.export.dtype_check.watchers import HalfWatcher
from halfserve.export.half_types import FP16, FP16_OVERFLOW
from tests.export.dtype_check.pairs.held import Attribute
from tests.whole_words import broken_words, printed

HERE = SourceLine(__file__, 1)


def a_log() -> FindingLog:
    log = FindingLog()
    log.add("factory", "note", HERE, "a", "first", "new_zeros(x, ...)")
    log.add("factory", "error", HERE, "b", "worse", "new_zeros(x, ...)")
    log.add("factory", "warning", HERE, "c", "milder", "new_zeros(x, ...)")
    log.add("epsilon", "warning", None, "cos", "1e-08 is 0", "finfo(x).tiny")
    return log


def test_a_line_is_listed_once_with_its_worst_symptom() -> None:
    first, second = a_log().sorted()
    assert (first.severity, first.symptom, first.module, first.times) == ("error", "worse", "a", 3)
    assert (first.line, first.source) == (1, "from __future__ import annotations")
    assert second.where == "(cos)"


def test_a_removed_finding_is_gone() -> None:
    log = FindingLog()
    log.remove(log.add("squares", "warning", HERE, "", "s", "f"))
    assert log.sorted() == ()


def test_json_holds_every_finding() -> None:
    report = LeakReport(model="Net", findings=a_log().sorted())
    read = json.loads(json.dumps(report.to_json()))
    assert read["counts"] == {"error": 1, "warning": 1, "note": 0}
    assert [Finding(**finding) for finding in read["findings"]] == list(report.findings)
    assert not report.clean


def test_the_text_forms() -> None:
    report = LeakReport(model="Net", findings=a_log().sorted())
    assert totals(report) == "1 error, 1 warning"
    assert str(report).splitlines()[1] == "warning: (cos): epsilon: 1e-08 is 0 (fix: finfo(x).tiny)"
    empty = LeakReport(model="Net", findings=())
    assert (str(empty), totals(empty), empty.clean) == ("Net: no dtype leaks", "no dtype leaks", True)


def test_the_table_keeps_words_whole_in_eighty_columns() -> None:
    log = FindingLog()
    place = SourceLine("transformers/models/bert/modeling_bert.py", 242)
    log.add("factory", "error", place, "encoder.layer.11.attention.self", "gives float32", "new_zeros(hidden_states, ...)")
    assert broken_words(leak_table(LeakReport(model="BertModel", findings=log.sorted()))) == []


def test_the_table_shows_each_finding_with_its_fix() -> None:
    text = printed(leak_table(LeakReport(model="Net", findings=a_log().sorted())), 160)
    for piece in ("errors (wrong numbers or a crash)", "in a, 3 times", "new_zeros(x, ...)", "finfo(x).tiny", "Net: 1 error"):
        assert piece in text


def test_a_frame_belongs_to_torch_a_library_or_the_user() -> None:
    locator = SourceLocator.of(nn.Linear(1, 1))
    assert locator.owner(torch.__file__) == "machinery"
    assert locator.owner(os.__file__) == "machinery"
    assert locator.owner("<string>") == "machinery"
    assert locator.owner(pytest.__file__) == "library"
    assert locator.owner(__file__) == "user"
    assert SourceLocator(frozenset({"pytest"})).owner(pytest.__file__) == "user"


def test_the_innermost_line_of_the_user_counts() -> None:
    locator = SourceLocator(frozenset())
    lines = [(__file__, 1), (torch.__file__, 2), (__file__, 3), (torch.__file__, 4), (pytest.__file__, 5)]
    assert locator.from_texts(iter(lines)) == SourceLine(__file__, 3)
    assert locator.from_texts(iter([(torch.__file__, 2)])) is None
    here = locator.here()
    assert here is not None
    assert here.source == "here = locator.here()"


def test_files_are_named_as_short_as_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert SourceLine(str(tmp_path / "model.py"), 3).file == "model.py"
    assert str(SourceLine(torch.__file__, 7)) == "torch/__init__.py:7"
    assert SourceLine("/elsewhere/model.py", 1).file == "/elsewhere/model.py"
    assert SourceLine("/elsewhere/model.py", 1).source == ""


def test_an_assignment_is_found_in_the_class_or_its_parents() -> None:
    class Child(Attribute):
        pass

    place = assigned_at(Child, "scale")
    assert place is not None
    assert place.source == "self.scale = torch.ones(4) / 3  # here"
    assert assigned_at(Child, "nothing") is None
    assert assigned_at(nn.Linear, "weight") is None
    made = type("Made", (nn.Module,), {})
    assert assigned_at(made, "scale") is None


def test_a_line_outside_of_autocast_has_no_region() -> None:
    assert autocast_region(SourceLine(__file__, 1)) is None
    assert autocast_region(SourceLine("/no/such/file.py", 1)) is None


add: Any = torch.ops.aten.add.Tensor


def operation(func: Any, *args: Any, overload: Any = add) -> Operation:
    """An operation that runs `func`, under an aten operator's name."""

    class Named:
        _schema = overload._schema

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

    return Operation(func=Named(), args=args, kwargs={}, module="", writer="", call=None, locate=lambda: None, half=FP16)


def watcher() -> HalfWatcher:
    return HalfWatcher(FindingLog(), set(), SourceLocator(frozenset()))


def test_mixed_dtypes_that_fail_are_repeated_in_float16() -> None:
    made = watcher().operate(operation(torch.mm, torch.ones(2, 2), torch.ones(2, 2).half()))
    assert made.dtype == torch.float16


def test_numbers_out_of_range_are_repeated_within_it_and_infinities_and_flags_stay() -> None:
    seen: list[object] = []

    def refusing(*args: Any) -> Any:
        if args[1] == 1e9:
            raise RuntimeError("value cannot be converted")
        seen.extend(args[1:])
        return args[0]

    fill: Any = torch.ops.aten.masked_fill.Scalar
    watcher().operate(operation(refusing, torch.ones(2).half(), 1e9, -(10**9), 3, True, float("inf"), overload=fill))
    assert seen == [65504.0, -65504.0, 3, True, float("inf")]


@pytest.mark.parametrize("text", ["\"eig\" not implemented for 'Half'", "Unsupported dtype Half", "Half is not supported here"])
def test_an_operation_without_a_float16_kernel_is_repeated_in_float32(text: str) -> None:
    def add_where_there_is_a_kernel(x: torch.Tensor, y: Any) -> torch.Tensor:
        if x.dtype == torch.float16:
            raise NotImplementedError(text)
        return x.add_(y)

    x = torch.full((2,), 3.0).half()
    in_place: Any = torch.ops.aten.add_.Tensor
    assert watcher().operate(operation(add_where_there_is_a_kernel, x, 1, overload=in_place)) is x
    assert x.tolist() == [4, 4]


def test_other_errors_are_raised() -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        watcher().operate(operation(failing, torch.ones(2).half(), torch.ones(3).half()))


class Adding(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x.abs() + self.number


def found(model: nn.Module) -> LeakReport:
    return find_dtype_leaks(model, torch.ones(1, 4))


@settings(max_examples=15, deadline=None)
@given(exponent=st.floats(-14, 8), sign=st.sampled_from([-1, 1]))
def test_a_constant_is_reported_exactly_when_rounding_changes_it_much(exponent: float, sign: int) -> None:
    number = sign * 10**exponent
    held = float(torch.tensor(number, dtype=torch.float64).half())
    kinds = [
        finding.kind for finding in found(Adding(number)).findings if finding.severity != "note" and finding.kind != "overflow"
    ]
    if math.isinf(held):
        assert kinds == ["constant"]
    elif held == 0 or (abs(number) < 2**-14 and abs(held - number) > NOTABLE_ERROR * abs(number)):
        assert kinds == ["epsilon"]
    else:
        assert kinds == []


def test_the_first_infinite_number_is_where_rounding_says() -> None:
    edge = torch.tensor(FP16_OVERFLOW, dtype=torch.float64)
    assert edge.half().isinf()
    assert (edge - 1).half() == 65504


def test_a_mildly_subnormal_number_is_a_note() -> None:
    report = found(Adding(1e-5))
    assert report.clean
    assert "1e-05 is subnormal in float16: 1.00136e-05" in report.notes[0].symptom


def test_minus_infinity_as_a_mask_is_a_note() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(x > 1, float("-inf")).softmax(-1)

    report = found(Masked())
    assert report.clean
    assert [(note.kind, note.fix) for note in report.notes] == [("infinite_mask", "mask_value(x)")]


@pytest.mark.parametrize("number", [0.0, 1.0, -1e4, 65504.0, 6.2e-5, float("inf")])
def test_what_float16_holds_is_not_mentioned(number: float) -> None:
    assert found(Adding(number)).findings == ()


def test_numbers_beside_float32_tensors_are_not_judged() -> None:
    class Careful(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.float() + 1e-12).rsqrt().clamp(max=1e9).to(x.dtype)

    assert found(Careful()).findings == ()


class FullMask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + torch.full((x.shape[-1],), -1e9)).softmax(-1)


class FilledMask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[-1]).masked_fill(x[0] > 1, -1e9)  # nowhere, with these inputs
        return (x + mask[None]).softmax(-1)


class ScaledMask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + (1 - torch.ones(x.shape[-1])) * -1e9).softmax(-1)


class ChosenMask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x + torch.where(x[0] > 1, -1e9, 0.0)).softmax(-1)


@pytest.mark.parametrize("model", [FullMask(), FilledMask(), ScaledMask(), ChosenMask()])
def test_a_number_in_a_tensor_that_should_be_float16_is_told_in_the_same_call(model: nn.Module) -> None:
    report = found(model)
    assert [(error.kind, error.fix) for error in report.errors] == [("constant", "mask_value(x)")]
    assert "-1e+09 does not fit float16 (largest 65504), which this tensor becomes" in report.errors[0].symptom
    assert [warning.kind for warning in report.warnings] in (["factory"], ["numbers"])


def test_a_number_in_scores_that_are_float32_on_purpose_is_fine() -> None:
    class Upcast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float().masked_fill(x > 1, -1e9).softmax(-1).to(x.dtype)

    assert found(Upcast()).findings == ()
