"""Weights that change inside a region are cast again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_core import autocast


def by_copy(layer: nn.Linear, new: Tensor) -> None:
    with torch.no_grad():
        layer.weight.copy_(new)


def by_data(layer: nn.Linear, new: Tensor) -> None:
    layer.weight.data.copy_(new)


def by_foreach(layer: nn.Linear, new: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_copy_([layer.weight], [new])


def by_state_dict(layer: nn.Linear, new: Tensor) -> None:
    layer.load_state_dict({"weight": new})


def by_a_number(layer: nn.Linear, new: Tensor) -> None:
    with torch.no_grad():
        layer.weight[:] = new[0, 0].item()


WRITES = [by_copy, by_data, by_foreach, by_state_dict, by_a_number]


def outputs_before_and_after(region: Any, write: Callable[[nn.Linear, Tensor], None]) -> tuple[float, float]:
    layer, x = nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    layer.load_state_dict({"weight": torch.ones(1, 2)})
    with region:
        before = layer(x).item()
        write(layer, torch.full((1, 2), 3.0))
        return before, layer(x).item()


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("policy", [None, "cuda"])
def test_an_average_swapped_in_is_what_the_next_forward_uses(write: Callable[[nn.Linear, Tensor], None], policy: Any) -> None:
    assert outputs_before_and_after(autocast("cpu", torch.bfloat16, policy=policy), write) == (2.0, 6.0)


def cast_of_weight(y: Tensor) -> Any:
    """The node of y's graph that cast the weight: addmm or mm <- transpose <- cast."""
    assert y.grad_fn is not None
    transpose = next(node for node, _ in y.grad_fn.next_functions if node is not None)
    return transpose.next_functions[0][0]


def test_a_weight_used_twice_is_still_cast_once() -> None:
    layer, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    with autocast("cpu", torch.bfloat16):
        first = cast_of_weight(layer(x))
        x.bfloat16()  # a copy, but into no float32 tensor
        assert cast_of_weight(layer(x)) is first


def test_copies_do_what_they_did() -> None:
    with autocast("cpu", torch.bfloat16):
        x = torch.zeros(3)
        x.copy_(torch.tensor([1, 2, 3]))
        assert x.tolist() == [1.0, 2.0, 3.0]
        x.fill_(0)[1] = 7
        assert x.tolist() == [0.0, 7.0, 0.0]
        with pytest.raises(RuntimeError, match="must match the size"):
            x.copy_(torch.zeros(2))
        leaf = torch.ones(2, requires_grad=True)
        target = torch.zeros(2)
        target.copy_(leaf)
    target.sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [1.0, 1.0]
