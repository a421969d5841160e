from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from halfserve.export.dtype_check import dtype_inheritance as inherit
from halfserve.export.to_onnx.export_onnx import export_onnx, serialize
from tests.export.stored_models import open_session, run_session

Maker: TypeAlias = Callable[[Tensor], Tensor]

MAKERS: dict[str, Maker] = {
    "zeros": lambda x: inherit.new_zeros(x, x.shape[0], x.shape[1]),
    "ones": lambda x: inherit.new_ones(x, x.shape),
    "full": lambda x: inherit.new_full(x, x.shape[1], 2.5),
    "tensor": lambda x: inherit.new_tensor(x, [1.0, -0.1]).sum(),
    "arange": lambda x: inherit.new_arange(x, x.shape[1]),
    "arange down": lambda x: inherit.new_arange(x, x.shape[1] - 1, -1, -1),
    "arange fraction": lambda x: inherit.new_arange(x, 0, x.shape[1], 0.7)[-1],
    "linspace": lambda x: inherit.new_linspace(x, -1, 3.3, x.shape[1]),
    "eye": lambda x: inherit.new_eye(x, x.shape[1]).sum(0),
    "causal": lambda x: inherit.causal_mask(x, x.shape[1])[-1],
    "mask value": lambda x: x.masked_fill(x > 0, inherit.mask_value(x)),
}
floats = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


class Made(nn.Module):
    """Every maker at once, since an export takes half a second."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: x * 0 + make(x) for name, make in MAKERS.items()}


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.long)])
def test_the_exported_model_follows_sizes_and_dtype(dtype: torch.dtype) -> None:
    module = Made().eval()
    model = export_onnx(module, torch.ones(2, 5, dtype=dtype), dynamic_shapes=({0: "batch", 1: "n"},))
    session = open_session(serialize(model), "ORT_ENABLE_ALL")
    for shape in ((3, 9), (4, 1), (1, 3000)):
        x = torch.ones(shape, dtype=dtype)
        expected = module(x)
        for name, output in run_session(session, {"x": x.numpy()}).items():
            assert torch.equal(torch.from_numpy(output), expected[name]), name


@given(dtype=floats, start=st.integers(-3000, 3000), count=st.integers(0, 50), step=st.integers(-9, 9).filter(bool))
def test_arange_rounds_the_true_numbers_once(dtype: torch.dtype, start: int, count: int, step: int) -> None:
    made = inherit.new_arange(torch.zeros(1, dtype=dtype), start, start + count * step, step)
    assert made.tolist() == torch.tensor([start + i * step for i in range(count)], dtype=torch.float64).to(dtype).tolist()


@given(dtype=floats, start=st.floats(-100, 100), end=st.floats(-100, 100), steps=st.integers(1, 40))
def test_linspace_meets_both_ends_and_torch(dtype: torch.dtype, start: float, end: float, steps: int) -> None:
    made = inherit.new_linspace(torch.zeros(1, dtype=dtype), start, end, steps)
    exact = torch.linspace(start, end, steps, dtype=torch.float64)
    assert made.dtype == dtype
    assert made[0] == exact[0].to(dtype)
    assert torch.allclose(made.double(), exact, rtol=torch.finfo(dtype).eps, atol=100 * max(torch.finfo(dtype).eps, 1e-7))


@given(dtype=floats, n=st.integers(1, 12))
def test_the_causal_mask_hides_the_future_and_nothing_else(dtype: torch.dtype, n: int) -> None:
    scores = torch.zeros(n, n, dtype=dtype)
    weights = (scores + inherit.causal_mask(scores, n)).softmax(-1)
    assert torch.equal(weights > 0, torch.ones(n, n).tril() > 0)


def test_a_fully_masked_row_has_weights() -> None:
    scores = torch.randn(1, 4).half()
    assert (scores.masked_fill(torch.ones(1, 4) > 0, inherit.mask_value(scores)).softmax(-1) == 0.25).all()


def test_counting_goes_on_past_2048_in_half() -> None:
    assert inherit.new_arange(torch.zeros(1).half(), 2049, 4000, 2).unique().numel() > 480  # type: ignore[no-untyped-call]  # (torch's own)


def test_tensors_and_arrays_are_taken_as_data() -> None:
    x = torch.zeros(1).half()
    assert inherit.new_tensor(x, torch.ones(2)).dtype == torch.float16
    assert inherit.new_tensor(x, torch.ones(2).numpy()).dtype == torch.float16
    assert inherit.new_empty(x, 2, 3).shape == (2, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: inherit.new_full(x, 2, 1e9), r"new_full: 1e\+09 does not fit torch.float16 \(largest value 65504\)"),
        (lambda x: inherit.new_tensor(x, [0, [2e5]]), "new_tensor: 200000 does not fit"),
        (lambda x: inherit.new_arange(x, 70000), "new_arange: 69999 does not fit"),
        (lambda x: inherit.new_linspace(x, 0, -1e6, 3), r"new_linspace: -1e\+06 does not fit"),
        (lambda x: inherit.new_arange(x, 0, 3, 0), "new_arange: step is 0"),
    ],
)
def test_what_half_cannot_hold_is_refused(make: Maker, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(torch.zeros(1).half())


def test_infinity_is_no_overflow() -> None:
    assert inherit.new_full(torch.zeros(1).half(), 1, float("-inf")).item() == float("-inf")


def test_limits_of_integers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a floating tensor to take limits from, got torch\.int64"):
        inherit.mask_value(torch.zeros(1, dtype=torch.int64))
