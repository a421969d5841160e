from __future__ import annotations

import torch

from export.leaks import recovery


def test_wide_arguments_are_rounded() -> None:
    made = recovery.with_half(torch.mm, (torch.ones(2, 2), torch.ones(2, 2).half()), {})
    assert made.dtype == torch.float16


def test_numbers_are_moved_into_range_and_infinities_and_flags_stay() -> None:
    seen: list[object] = []
    recovery.with_bounded_numbers(
        lambda *args, **kwargs: seen.extend([*args, kwargs]), (1e9, -(10**9), 3, True), {"v": float("inf")}
    )
    assert seen == [65504.0, -65504.0, 3, True, {"v": float("inf")}]


def test_an_operation_without_a_kernel_runs_in_float32() -> None:
    x = torch.full((2,), 3.0).half()
    assert recovery.with_float32(torch.add, (x, 1), {}).dtype == torch.float16
    assert recovery.with_float32(torch.Tensor.add_, (x, 1), {}) is x
    assert x.tolist() == [4, 4]


def test_which_errors_mean_a_missing_kernel() -> None:
    for text in ("\"eig\" not implemented for 'Half'", "Unsupported dtype Half", "Half is not supported here"):
        assert recovery.lacks_kernel(RuntimeError(text))
    assert not recovery.lacks_kernel(RuntimeError("mat1 and mat2 must have the same dtype, but got Float and Half"))


def test_mixing() -> None:
    assert recovery.mixes((torch.ones(1), [torch.ones(1).half()]), {})
    assert not recovery.mixes((torch.ones(1).half(), torch.ones(1).long()), {})
