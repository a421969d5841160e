"""Every operation is put down to its module, forward and backward."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfserve.amp_core.recorder.module_spans import ModuleSpans, hooked
from tests.amp_core.recorder.recording import Block, ops, recorded

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def test_forward_and_backward_of_each_module() -> None:
    model = nn.Sequential(Block(), nn.ReLU(), Block())
    record = recorded(lambda: model(X).square().sum().backward(), model)
    assert ops(record, "0.linear", "forward") == ["addmm"]
    assert ops(record, "0", "forward") == ["tanh", "add"]
    assert ops(record, "1", "forward") == ["relu"]
    assert ops(record, "", "forward") == ["pow", "sum", "ones_like"]
    assert set(ops(record, "", "backward")) == {"pow", "mul"}
    assert ops(record, "2", "backward") == ["tanh_backward"]
    assert set(ops(record, "2.linear", "backward")) == {"mm", "sum", "add"}  # the shortcut's gradient is added to its own
    assert ops(record, "1", "backward") == ["threshold_backward"]
    assert ops(record, "0", "backward") == ["tanh_backward"]
    # The model's input needs no gradient, so that hooks on tensors would never see this one end.
    assert set(ops(record, "0.linear", "backward")) == {"mm", "sum"}


def test_gradients_that_meet_belong_to_where_they_come_from() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Block())
    record = recorded(lambda: model(X).sum().backward(), model)
    assert ops(record, "1.linear", "backward").count("add") == 1


def test_the_model_itself_is_not_the_loss() -> None:
    model = Block()
    record = recorded(lambda: model(X).sum().backward(), model)
    assert ops(record, ".", "forward") == ["tanh", "add"]
    assert ops(record, "", "forward") == ["sum", "ones_like"]
    assert ops(record, ".", "backward") == ["tanh_backward"]


def test_a_module_that_runs_three_times() -> None:
    block = Block()
    record = recorded(lambda: block(block(block(X))).sum().backward(), nn.ModuleDict({"a": block, "b": block}))
    (tanh,) = (entry for entry in record.entries if entry.op == "aten.tanh.default")
    assert (tanh.module, tanh.calls) == ("a", 3)
    assert {entry.module for entry in record.entries if entry.op == "aten.tanh_backward.default"} == {"a"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_is_forward(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Block(), Block(), nn.Linear(4, 4))

    def body() -> None:
        x = model[0](X)
        for block in (model[1], model[2]):
            x = checkpoint(block, x, use_reentrant=reentrant)
        model[3](x).sum().backward()

    record = recorded(body, model)
    for path in ("1", "2"):
        (tanh,) = (e for e in record.entries if (e.module, e.op) == (path, "aten.tanh.default"))
        assert (tanh.direction, tanh.calls) == ("forward", 2)
        assert "tanh_backward" in ops(record, path, "backward")
        assert "addmm" not in ops(record, f"{path}.linear", "backward")
    assert "mm" in ops(record, "0", "backward")
    assert "tanh_backward" not in ops(record, "", "backward")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # the outer one's first run is without
def test_nested_checkpoints() -> None:
    inner, outer = Block(), nn.ModuleDict({"linear": nn.Linear(4, 4)})

    def forward(x: Tensor) -> Tensor:
        return checkpoint(inner, outer["linear"](x), use_reentrant=True)  # type: ignore[no-any-return]

    model = nn.ModuleDict({"inner": inner, "outer": outer})
    x = torch.randn(2, 4, requires_grad=True)
    record = recorded(lambda: checkpoint(forward, x, use_reentrant=True).sum().backward(), model)
    assert "tanh_backward" in ops(record, "inner", "backward")
    assert "mm" in ops(record, "outer.linear", "backward")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.exp(grads[0]) * 0 + 2


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def test_a_custom_function_and_in_place_operations() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Custom(), nn.ReLU(inplace=True))
    record = recorded(lambda: model(X).sum().backward(), model)
    assert "exp" in ops(record, "1", "backward")
    assert ops(record, "2", "forward") == ["relu_"]
    assert ops(record, "2", "backward") == ["threshold_backward"]


def test_a_gradient_penalty() -> None:
    model = nn.Sequential(Block(), nn.Linear(4, 1))

    def body() -> None:
        x = torch.randn(2, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()  # type: ignore[no-untyped-call]

    record = recorded(body, model)
    # tanh's second derivative multiplies by tanh itself: that is the block's, not the loss's.
    assert "mul" in ops(record, "0", "backward")
    assert {"pow", "sum"} <= set(ops(record, "", "forward"))


def test_a_gradient_that_is_taken_within_forward() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                return torch.autograd.grad(torch.tanh(y).sum(), y)[0]

    record = recorded(lambda: nn.Sequential(Inner())(torch.randn(3)), nn.ModuleDict({"inner": nn.Identity()}))
    assert "tanh_backward" in ops(record, "", "backward")
    model = nn.Sequential(Inner())
    assert "tanh_backward" in ops(recorded(lambda: model(torch.randn(3)), model), "0", "backward")


def test_a_module_that_fails_and_is_caught() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    model = nn.Sequential(nn.Sequential(Failing()), nn.Tanh())

    def body() -> None:
        with pytest.raises(ValueError, match="no"):
            model[0](torch.ones(2))
        torch.exp(torch.ones(2))
        model[1](torch.ones(2))

    record = recorded(body, model)
    assert "exp" in ops(record, "")
    assert ops(record, "1") == ["tanh"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_in_another_thread_as_on_an_accelerator(reentrant: bool) -> None:
    """There the second thread numbers its own nodes from 0, so that they collide with the first one's."""
    seen: list[tuple[str, str]] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            seen.append(spans.current())
            return grads[0]

    class Looked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Look.apply(x * 1.5)  # type: ignore[no-any-return,no-untyped-call]

    model = nn.ModuleDict({name: Looked() for name in "abcd"})
    spans = ModuleSpans(model)

    def forward() -> Tensor:
        x = model["a"](torch.ones(2, requires_grad=True))
        x = checkpoint(lambda y: model["c"](model["b"](y)), x, use_reentrant=reentrant)
        return model["d"](x).sum()  # type: ignore[no-any-return]

    with hooked(model, spans):
        for loss in (forward(), forward()):
            thread = threading.Thread(target=torch.autograd.backward, args=(loss,))
            thread.start()
            thread.join()
    assert seen == 2 * [(name, "backward") for name in "dcba"]
