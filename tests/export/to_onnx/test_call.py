from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from export.errors import ExportError
from export.to_onnx.call import call_of


class Many(nn.Module):
    def forward(self, first: Tensor, *rest: Tensor, scale: float = 1.0, masks: Any = None) -> Tensor:
        del rest, masks
        return first * scale


class DynamicCache:
    pass


ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("inputs", "kwargs", "names"),
    [
        (ONE, None, ("first",)),
        ([ONE, ONE, ONE], None, ("first", "rest_0", "rest_1")),
        ({"first": ONE, "masks": {"left": ONE, "right": [ONE, None]}}, None, ("first", "masks.left", "masks.right.0")),
        ((ONE,), {"masks": ONE, "scale": 2.0}, ("first", "masks")),
    ],
)
def test_tensors_have_the_names_of_their_places(inputs: Any, kwargs: Any, names: tuple[str, ...]) -> None:
    assert call_of(Many(), inputs, kwargs).names == names


def test_the_call_is_put_together_again() -> None:
    call = call_of(Many(), [ONE, ONE], {"scale": 2.0, "masks": [None, ONE]})
    args, kwargs = call.arguments([torch.tensor([float(index)]) for index in range(3)])
    assert [tensor.item() for tensor in args] == [0, 1]
    assert (kwargs["scale"], kwargs["masks"][0], kwargs["masks"][1].item()) == (2.0, None, 2)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], r"Many.forward\(first, rest, scale, masks\) does not take these inputs: missing a required argument: 'first'"),
        ({"first": ONE, "nope": ONE}, "got an unexpected keyword argument 'nope'"),
        ({"first": None}, "inputs: expected an example tensor"),
        (7, "inputs is a int; expected a tensor, a sequence of arguments, or a dict"),
        ({"first": ONE, "masks": DynamicCache()}, "'masks' is a DynamicCache; an ONNX model takes tensors only"),
        ({"first": ONE, "masks": object()}, "'masks' is a object; expected a tensor, or a plain number"),
    ],
)
def test_what_is_no_call_is_said(inputs: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        call_of(Many(), inputs)
