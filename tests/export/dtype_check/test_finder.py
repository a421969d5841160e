from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfserve.export.dtype_check.finder import find_dtype_leaks
from halfserve.export.dtype_check.findings import KINDS, LeakReport
from halfserve.export.export_errors import ExportError, UsageError
from halfserve.export.half_types import HalfName
from tests.export.dtype_check.pairs.cases import CASES
from tests.export.dtype_check.pairs.factories import Factory, FactoryMended
from tests.export.dtype_check.pairs.held import Complex, Turn
from tests.export.dtype_check.pairs.projected import Projected, projected
from tests.export.dtype_check.pairs.values import MaskedFill, Table


def file_of(model: type) -> str:
    """The file of a class as findings name it."""
    path = Path(inspect.getfile(model))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def marked_line(model: type) -> int:
    """The line that `# here` marks in a class, or in the class of a part of it."""
    for owner in (model, *(Turn,) * (model is Complex)):
        lines, start = inspect.getsourcelines(owner)
        marked = [start + index for index, line in enumerate(lines) if "# here" in line]
        if marked:
            return marked[0]
    raise AssertionError(f"{model} has no mark")


SHORT = ("factory", "masked_fill", "manual variance", "round trip", "attribute")


def check(model: type[nn.Module], dtype: HalfName = "float16") -> LeakReport:
    torch.manual_seed(0)
    return find_dtype_leaks(model(), torch.tensor([[0.5, -1.0, 1.5, 0.25], [-0.75, 1.0, 0.125, 2.0]]), dtype=dtype)


@pytest.mark.parametrize("name", CASES)
def test_a_leak_is_found_at_its_line_and_nothing_else_is(name: str) -> None:
    model, _, kind, severity, fix, symptom = CASES[name]
    report = check(model)
    assert not report.clean
    (found,) = [finding for finding in report.findings if finding.severity != "note"]
    assert (found.kind, found.severity, found.fix) == (kind, severity, fix)
    assert (found.file, found.line) == (file_of(model), marked_line(model))
    assert found.source.endswith("# here")
    assert symptom.replace("PLACE", file_of(model)).replace("PROJECTED", file_of(Projected)) in found.symptom
    assert found.kind in KINDS


# What bfloat16 holds, as it has float32's range.
IN_RANGE = frozenset(
    {"masked_fill", "mask by product", "epsilon that vanishes", "subnormal epsilon", "epsilon inside torch"}
    | {"epsilon as a tensor", "overflow", "scale"}
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in SHORT else pytest.mark.long) for name in CASES])
def test_in_bfloat16_the_same_leaks_are_found_except_for_its_range(name: str) -> None:
    model, _, kind, severity, _, _ = CASES[name]
    report = check(model, "bfloat16")
    assert report.to_json()["dtype"] == "bfloat16"
    found = {(finding.kind, finding.severity) for finding in report.findings if finding.severity != "note"}
    # numpy has no bfloat16, so that a round trip through it fails besides.
    besides = {("crash", "error")} if name == "round trip" else set()
    assert found == (besides if name in IN_RANGE else {(kind, severity)} | besides)
    assert not any("float16" in finding.symptom.replace("bfloat16", "") for finding in report.findings)


def test_in_bfloat16_whole_numbers_are_exact_up_to_256() -> None:
    (found,) = check(CASES["positions"][0], "bfloat16").warnings
    assert "which is exact up to 256: 257 becomes 256" in found.symptom


def test_another_type_is_refused() -> None:
    with pytest.raises(UsageError, match="dtype is 'float8'; expected 'float16' or 'bfloat16'"):
        check(Factory, "float8")  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[1] is not None])
def test_the_mended_twin_is_clean(name: str) -> None:
    mended = CASES[name][1]
    assert mended is not None
    report = check(mended)
    assert report.findings == (), str(report)


def test_several_leaks_are_found_in_one_run() -> None:
    class Three(Projected):
        def forward(self, x: Tensor) -> Tensor:
            x = self.project(x + torch.zeros(4))
            x = self.project(x.float())
            return self.project(x).masked_fill(x > 0, -1e9)

    report = check(Three)
    start = inspect.getsourcelines(Three)[1]
    assert [(finding.line, finding.kind) for finding in report.errors] == [
        (start + 2, "factory"),
        (start + 3, "upcast"),
        (start + 4, "constant"),
    ]


def test_a_line_that_runs_in_every_layer_is_one_finding() -> None:
    report = find_dtype_leaks(nn.Sequential(*(MaskedFill() for _ in range(3))), torch.ones(2, 4))
    (found,) = report.errors
    assert (found.module, found.times) == ("0", 3)


HARMLESS: dict[str, tuple[type[nn.Module], str, str]] = {
    "a rounded back factory": (
        projected(lambda net, x: net.project((x + torch.ones(4)).to(x.dtype))),
        "factory", "until it is rounded back",
    ),
    "a float32 output by choice": (
        projected(lambda net, x: net.project(x).float()), "upcast", "the output is float32 in a float16 model",
    ),
    "rounding in place": (
        projected(lambda net, x: net.project(x).add_(torch.ones(4))),
        "factory", "rounds into a float16 tensor in place",
    ),
    "a number that leaves torch": (
        projected(lambda net, x: net.project(x) * max(x.abs().max().item(), 1.0)), "round_trip", ".item() leaves torch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_no_harm_is_a_note(name: str) -> None:
    model, kind, symptom = HARMLESS[name]
    report = check(model)
    assert report.clean
    assert symptom in next(note.symptom for note in report.notes if note.kind == kind)


def test_infinities_of_the_float32_model_are_not_blamed_on_float16() -> None:
    assert check(projected(lambda net, x: net.project(x).relu().mul(0).log())).findings == ()


def test_the_table_of_a_submodule_is_a_note_because_to_half_keeps_it() -> None:
    report = find_dtype_leaks(nn.Sequential(nn.Linear(4, 4), Table()), torch.ones(2, 4))
    assert report.clean
    assert [(note.kind, note.module, note.fix) for note in report.notes] == [("kept_float32", "1", "to_half")]


def test_lines_that_did_not_run_are_read() -> None:
    class Branching(Projected):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 100:
                x = x + torch.zeros(4)
                x = x.masked_fill(x > 0, -1e9)
            return self.project(x + torch.zeros(4, dtype=x.dtype))

    report = check(Branching)
    start = inspect.getsourcelines(Branching)[1]
    assert report.clean
    assert [(note.line, note.kind, note.fix) for note in report.notes] == [
        (start + 3, "not_reached", "new_zeros(x, ...)"),
        (start + 4, "not_reached", "mask_value(x)"),
    ]


def test_the_model_and_its_inputs_stay_as_they_were() -> None:
    class Counting(Projected):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.project(x.mul_(2))

    model, x = Counting().train(), torch.ones(2, 4)
    assert find_dtype_leaks(model, x).clean
    assert (model.calls, model.training, model.linear.weight.dtype) == (0, True, torch.float32)
    assert torch.equal(x, torch.ones(2, 4))


def test_nested_and_named_inputs_are_halved() -> None:
    class Nested(Projected):
        def forward(self, batch: dict[str, list[Tensor]], *, scale: Tensor) -> dict[str, Tensor]:
            return {"y": self.project(batch["x"][0]) * scale}

    assert find_dtype_leaks(Nested(), {"x": [torch.ones(2, 4)]}, scale=torch.ones(4)).findings == ()


def test_a_history_in_an_attribute_does_not_hinder() -> None:
    class Kept(Projected):
        def __init__(self) -> None:
            super().__init__()
            self.last = self.project(torch.ones(1, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.project(x) + self.last

    assert [finding.kind for finding in check(Kept).warnings] == ["attribute"]


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (len, (), "expected a torch.nn.Module to check, got a builtin_function_or_method"),
        (nn.Linear(4, 4), (torch.ones(2, 5),), r"fails in float32 on inputs float32\[2, 5\]: RuntimeError: mat1 and mat2"),
        (nn.Linear(4, 4), (), "fails in float32 on inputs none: TypeError: Linear.forward"),
        (nn.LazyLinear(4), (torch.ones(2, 4),), "a lazy module"),
        (nn.Linear(4, 4, device="meta"), (torch.ones(2, 4),), "on the meta device, which holds no numbers"),
    ],
)  # fmt: skip
def test_what_cannot_be_checked_is_one_line(model: nn.Module, inputs: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(ExportError, match=message) as raised:
        find_dtype_leaks(model, *inputs)
    assert "\n" not in str(raised.value)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_what_torch_compile_wraps_is_checked() -> None:
    report = find_dtype_leaks(torch.compile(Factory()), torch.ones(2, 4))  # type: ignore[arg-type]  # (it returns a module)
    assert (report.model, len(report.errors)) == ("Factory", 1)


def test_a_weight_that_stays_float32_must_be_used_through_its_module() -> None:
    class Reading(Projected):
        def __init__(self) -> None:
            super().__init__()
            self.large = nn.Linear(4, 4)
            nn.init.constant_(self.large.weight, 1e5)

        def forward(self, x: Tensor) -> Tensor:
            return self.project(nn.functional.linear(x, self.large.weight / 1e4))

    (found,) = check(Reading).errors
    assert (found.kind, found.module, found.fix) == ("kept", "large", "forward")
    assert "'large.weight' stays float32[4, 4]" in found.symptom
    assert "linear at" in found.symptom


def test_the_callers_autocast_region_is_not_the_models() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert check(FactoryMended).findings == ()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_control_flow_operators_are_let_through() -> None:
    class Branches(Projected):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a * 2, (x,))
            return self.project(y)

    assert check(Branches).clean


class Choosing(nn.Module):
    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        return torch.cond(flag, torch.sin, torch.clone, (x * 2,))  # type: ignore[no-any-return]  # (torch's is untyped)


@pytest.mark.long
def test_a_model_that_compiles_parts_of_itself_works_afterwards() -> None:
    model, x, flag = Choosing().eval(), torch.ones(2, 4), torch.tensor(True)
    find_dtype_leaks(model, x, flag)
    torch.testing.assert_close(model(x, flag), torch.sin(x * 2))


class Answer(dict[str, Tensor]):
    """A container of a library's own."""


def _flattened(answer: Answer) -> tuple[list[Tensor], list[str]]:
    return list(answer.values()), list(answer)


def _answer(members: Iterable[Tensor], names: list[str]) -> Answer:
    return Answer(zip(names, members, strict=True))


class Answering(nn.Module):
    def forward(self, x: Tensor) -> Answer:
        return Answer(same=x, wide=x.float())


def test_members_of_a_container_without_names_are_counted() -> None:
    pytree.register_pytree_node(Answer, _flattened, _answer)  # as diffusers does: it has no names for members
    try:
        (found,) = find_dtype_leaks(Answering(), torch.rand(2, 4)).findings
    finally:
        for registry in (pytree.SUPPORTED_NODES, pytree.SUPPORTED_SERIALIZED_TYPES):
            registry.pop(Answer)
    assert "output [1]" in found.symptom


@pytest.mark.parametrize("returns", ["float64", "float16"])
def test_float64_that_a_line_asks_for_is_no_leak(returns: str) -> None:
    class Double(Projected):
        def forward(self, x: Tensor) -> Tensor:
            mean = self.project(x).double().mean(-1)
            return mean if returns == "float64" else mean.to(x.dtype)

    assert check(Double).findings == ()
