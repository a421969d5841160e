from __future__ import annotations

from typing import Any

import pytest
import torch

from halfserve.export.dtype_check.findings import FindingLog
from halfserve.export.dtype_check.source_lines import SourceLocator
from halfserve.export.dtype_check.watched_run import Operation
from halfserve.export.dtype_check.watchers import HalfWatcher
from halfserve.export.half_types import FP16

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
