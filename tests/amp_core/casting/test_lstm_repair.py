"""LSTM layers in float16 on the CPU, with float16 instructions and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_core import autocast

X = torch.linspace(-1, 1, 6 * 4 * 8).reshape(6, 4, 8)  # (time, batch, features)
CLOSE = {torch.float16: 2e-3, torch.bfloat16: 2e-2}


def gradients(layer: nn.LSTM, x: torch.Tensor, region: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    layer.zero_grad()
    with region:
        output, (hidden, cell) = layer(x)
        loss = output.float().pow(2).mean() + hidden.float().mean() + cell.float().mean()
    loss.backward()
    return output, [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("policy", [None, "cuda"])
@pytest.mark.parametrize("shape", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True}, {"bias": False}])
def test_an_lstm_computes_what_it_does_in_float32(dtype: torch.dtype, policy: str | None, shape: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(8, 8, **shape)
    expected, expected_gradients = gradients(layer, X, autocast("cpu", enabled=False))
    output, found = gradients(layer, X, autocast("cpu", dtype, policy=policy))
    assert output.dtype is dtype
    assert {gradient.dtype for gradient in found} == {torch.float32}
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=CLOSE[dtype])
    torch.testing.assert_close(found, expected_gradients, rtol=0, atol=CLOSE[dtype])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_an_lstm_is_checkpointed(use_reentrant: bool) -> None:
    layer, x = nn.LSTM(8, 8), X.clone().requires_grad_()
    with autocast("cpu", torch.float16):
        output, _ = checkpoint(layer, x, use_reentrant=use_reentrant)
    output.float().sum().backward()
    assert (output.dtype, x.grad is not None) == (torch.float16, True)


def test_an_lstm_compiles() -> None:
    layer = nn.LSTM(8, 8)

    @torch.compile(backend="aot_eager")
    def compiled(x: torch.Tensor) -> Any:
        with autocast("cpu", torch.float16):
            return layer(x)[0]

    assert compiled(X).dtype is torch.float16
