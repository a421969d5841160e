"""LSTMs, GRUs and plain RNNs in a region on the CPU, whatever oneDNN has for its processor."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from halfserve import autocast
from halfserve.amp_core.autocast import torch_kernels

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
X = torch.linspace(-1, 1, 6 * 4 * 8).reshape(6, 4, 8)  # (time, batch, features)
CLOSE = {HALF: 2e-3, BRAIN: 2e-2}
SHAPES: list[dict[str, Any]] = [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True}, {"bias": False}]
LAYER, LAYER_BACKWARD = torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.aten.mkldnn_rnn_layer_backward.default

# Pairs (dtype, whether with gradients): the LSTMs that oneDNN has.
PROCESSORS = {
    "none": set(),
    "for inference": {(HALF, False), (BRAIN, False)},
    "all": {(HALF, False), (BRAIN, False), (HALF, True), (BRAIN, True)},
}


class Processor(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """oneDNN's LSTMs on another processor; they are computed in float32 here.

    Attributes:
        dtypes: The dtype of each layer that was asked for, in order.
    """

    def __init__(self, lstms: set[tuple[torch.dtype, bool]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.lstms = lstms
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (LAYER, LAYER_BACKWARD):
            return func(*args, **(kwargs or {}))
        dtype = args[0].dtype
        if func is LAYER:
            self.dtypes.append(dtype)
            if dtype is not FULL and (dtype, torch.is_grad_enabled()) not in self.lstms:
                raise RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive")
        in_full = [arg.float() if isinstance(arg, Tensor) and arg.dtype is dtype else arg for arg in args]
        return tuple(
            result.to(dtype) if isinstance(result, Tensor) and result.dtype is FULL else result for result in func(*in_full)
        )


def outputs(layer: nn.LSTM, x: Tensor, region: Any) -> tuple[Tensor, Tensor, Tensor]:
    with region:
        output, (hidden, cell) = layer(x)
    return output, hidden, cell


def gradients(layer: nn.LSTM, x: Tensor, region: Any) -> tuple[Tensor, list[Tensor]]:
    layer.zero_grad()
    output, hidden, cell = outputs(layer, x, region)
    loss = output.float().pow(2).mean() + hidden.float().mean() + cell.float().mean()
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    return output, [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("policy", [None, "cuda"])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_lstm_computes_what_it_does_in_float32(dtype: torch.dtype, policy: str | None, shape: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(8, 8, **shape)
    expected, expected_gradients = gradients(layer, X, autocast("cpu", enabled=False))
    output, found = gradients(layer, X, autocast("cpu", dtype, policy=policy))
    assert output.dtype is dtype
    assert {gradient.dtype for gradient in found} == {FULL}
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=CLOSE[dtype])
    torch.testing.assert_close(found, expected_gradients, rtol=0, atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_an_lstm_without_gradients_does_too(dtype: torch.dtype, without: Any) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(8, 8)
    with without():
        expected = outputs(layer, X, autocast("cpu", enabled=False))
        found = outputs(layer, X, autocast("cpu", dtype))
    assert {tensor.dtype for tensor in found} == {dtype}
    torch.testing.assert_close([tensor.float() for tensor in found], list(expected), rtol=0, atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("processor", PROCESSORS)
def test_an_lstm_is_in_float32_where_onednn_has_none_for_the_step(
    processor: str, trains: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    lstms = PROCESSORS[processor]
    monkeypatch.setattr(torch_kernels, "has_lstm", lambda dtype, trains: (dtype, trains) in lstms)
    torch.manual_seed(0)
    layer = nn.LSTM(8, 8, bidirectional=True)
    expected, expected_gradients = gradients(layer, X, autocast("cpu", enabled=False))
    with Processor(lstms) as onednn, torch.set_grad_enabled(trains):
        if trains:
            output, found = gradients(layer, X, autocast("cpu", dtype))
            torch.testing.assert_close(found, expected_gradients, rtol=0, atol=CLOSE[dtype])
        else:
            output, *_ = outputs(layer, X, autocast("cpu", dtype))
    assert onednn.dtypes == [dtype if (dtype, trains) in lstms else FULL] * 2  # forth and back
    assert output.dtype is dtype
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=CLOSE[dtype])


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("dtype", CLOSE)
def test_what_onednn_has_is_the_same_inside_torchs_modes(dtype: torch.dtype, trains: bool) -> None:
    expected = torch_kernels.has_lstm.__wrapped__(dtype, trains)
    with FakeTensorMode(), torch.inference_mode(), autocast("cpu", HALF), torch.device("meta"):
        assert torch_kernels.has_lstm.__wrapped__(dtype, trains) is expected


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_an_lstm_is_checkpointed(use_reentrant: bool, dtype: torch.dtype) -> None:
    layer, x = nn.LSTM(8, 8), X.clone().requires_grad_()
    with autocast("cpu", dtype):
        output, _ = checkpoint(layer, x, use_reentrant=use_reentrant)
    output.float().sum().backward()
    assert (output.dtype, x.grad is not None) == (dtype, True)


@pytest.mark.parametrize("dtype", CLOSE)
def test_an_lstm_compiles(dtype: torch.dtype) -> None:
    layer = nn.LSTM(8, 8)

    @torch.compile(backend="aot_eager")
    def compiled(x: Tensor) -> Any:
        with autocast("cpu", dtype):
            return layer(x)[0]

    assert compiled(X).dtype is dtype


# Each layer runs twice, so that its weights are cast once or are cast twice and rounded in another order.
AS_TORCHS = """
import torch
from torch import nn

class All(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.GRU(8, 8), nn.RNN(8, 8), nn.GRU(8, 8)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)[0]
        return x, None

shapes = {}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True}, {"bias": False}
layers = {f"{kind.__name__} {shape}": kind(8, 8, **shape) for kind in (nn.GRU, nn.RNN, nn.LSTM) for shape in shapes}
layers["GRU, RNN, GRU"] = All()
layers["cell"] = nn.GRUCell(8, 8)
x = torch.randn(6, 4, 8)

def gradients(layer, region):
    layer.zero_grad()
    with region:
        if isinstance(layer, nn.GRUCell):
            hidden = None
            for step in x:
                hidden = layer(step, hidden)
            loss = hidden.float().square().sum()
        else:
            loss = (layer(x)[0] * layer(x.flip(0))[0]).float().square().sum()
    loss.backward()
    return [parameter.grad for parameter in layer.parameters()]

def all_gradients(region):
    found = {}
    for name, layer in layers.items():
        for dtype in (torch.float16, torch.bfloat16):
            try:
                found[name, dtype] = gradients(layer, region("cpu", dtype))
            except RuntimeError:
                assert name.startswith("LSTM")  # no processor has all of them for torch
    return found

expected = all_gradients(torch.autocast)  # before ours has changed torch's kernels
from halfserve import autocast
found = all_gradients(autocast)
for name, gradients in expected.items():
    if not all(map(torch.equal, gradients, found[name])):
        print(name)
print(len(expected))
"""


def run(program: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=500,
    )
    return done.stdout.splitlines()


@pytest.mark.long
def test_gradients_of_recurrent_layers_are_torchs_bit_for_bit() -> None:
    *different, compared = run(AS_TORCHS)
    assert different == []
    assert int(compared) >= 20  # without the LSTMs


TRAINED = """
import torch

def train(region):
    for dtype in (torch.float16, torch.bfloat16):
        layer = torch.nn.LSTM(8, 8)
        try:
            with region("cpu", dtype):
                output = layer(torch.randn(6, 4, 8))[0]
            output.float().sum().backward()
            print(output.dtype, layer.weight_hh_l0.grad.dtype)
        except RuntimeError as error:
            print(str(error).partition(" for ")[0])

train(torch.autocast)
from halfserve import autocast
train(autocast)
"""


@pytest.mark.long
def test_an_lstm_trains_where_torchs_does_not_as_onednn_has_none() -> None:
    refused = ["could not create a primitive descriptor"] * 2
    trained = ["torch.float16 torch.float32", "torch.bfloat16 torch.float32"]
    assert run(TRAINED, ONEDNN_MAX_CPU_ISA="AVX2") == refused + trained
