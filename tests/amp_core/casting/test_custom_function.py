from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from amp_core import autocast, custom_bwd, custom_fwd


class Multiply(torch.autograd.Function):
    backward_dtypes: tuple[torch.dtype, torch.dtype]

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        to_a = grads[0] @ b.T
        Multiply.backward_dtypes = (to_a.dtype, to_a.softmax(0).dtype)
        return to_a, a.T @ grads[0]


class InFloat32(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, a: Tensor) -> Tensor:
        assert a.dtype is torch.float32
        assert not torch.is_autocast_enabled("cpu")
        return a @ a

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, *grads: Any) -> Any:
        assert not torch.is_autocast_enabled("cpu")
        return grads[0]


multiply: Any = Multiply.apply
in_float32: Any = InFloat32.apply


@pytest.mark.parametrize(("policy", "softmax"), [(None, torch.float16), ("cuda", torch.float32)])
def test_backward_runs_under_its_forwards_dtype_and_policy(policy: str | None, softmax: torch.dtype) -> None:
    a, b = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
    with autocast("cpu", torch.float16, policy=policy):
        y = multiply(a, b)
    assert y.dtype is torch.float16
    torch.autograd.backward(y.sum())
    assert Multiply.backward_dtypes == (torch.float16, softmax)
    assert not torch.is_autocast_enabled("cpu")


def test_backward_of_a_forward_outside_a_region_runs_outside() -> None:
    a, b = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
    y = multiply(a, b)
    with autocast("cpu", torch.float16):
        torch.autograd.backward(y.sum())
    assert Multiply.backward_dtypes == (torch.float32, torch.float32)


def test_cast_inputs_runs_forward_with_autocast_off() -> None:
    a = torch.ones(2, 2, requires_grad=True)
    with autocast("cpu", torch.float16):
        y = in_float32(a.half())
    torch.autograd.backward(y.sum())
    assert y.dtype is torch.float32
