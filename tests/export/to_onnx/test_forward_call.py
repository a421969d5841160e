from __future__ import annotations

import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfserve import export_module, export_onnx, find_dtype_leaks, to_half
from halfserve.export.export_errors import ExportError
from halfserve.export.to_onnx.forward_call import call_of, named_tensors


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


X = torch.ones(1)
Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024  (what is tested)


@dataclass
class Answer:
    logits: Tensor
    loss: Tensor | None
    states: tuple[Tensor, ...]


def layers(count: int) -> Any:
    return SimpleNamespace(layers=[SimpleNamespace(keys=X, values=X) for _ in range(count)])


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (X, ["output"]),
        ((X, [X, None]), ["output_0", "output_1.0"]),
        (Pair(X, X), ["left", "right"]),
        (OrderedDict(logits=X, parts={"a": X}), ["logits", "parts.a"]),
        (Answer(X, None, (X, X)), ["logits", "states.0", "states.1"]),
        ({"past": layers(2)}, ["past.0.key", "past.0.value", "past.1.key", "past.1.value"]),
        (
            {"past": SimpleNamespace(self_attention_cache=layers(1), cross_attention_cache=layers(1))},
            ["past.0.decoder.key", "past.0.decoder.value", "past.0.encoder.key", "past.0.encoder.value"],
        ),
    ],
)
def test_tensors_are_named_by_their_places(result: Any, names: list[str]) -> None:
    assert [name for name, _ in named_tensors(result)] == names


@pytest.mark.parametrize(
    ("result", "message"), [(None, "none here"), ({"a": {"b": 3}}, "a.b is a int"), ("text", "it is a str"), ([], "none here")]
)
def test_other_results_are_refused(result: Any, message: str) -> None:
    with pytest.raises(ExportError, match=f"the model must return tensors, .*; {message}"):
        named_tensors(result)


ROWS = torch.rand(2, 4)
CALLS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "export_module": lambda module, folder: export_module(module, ROWS, folder / "models", "m"),
    "export_onnx": lambda module, folder: export_onnx(module, [ROWS], folder / "m.onnx"),
    "find_dtype_leaks": lambda module, _: find_dtype_leaks(module, ROWS),
    "to_half": lambda module, _: to_half(module),
}


def scripted(kind: str) -> Any:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of TorchScript
        if kind == "traced":
            return torch.jit.trace(module, ROWS)  # type: ignore[no-untyped-call]  # (torch's)
        return torch.jit.script(module)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["scripted", "traced"])
def test_a_torchscript_module_is_refused_with_a_way_out(call: str, kind: str, tmp_path: Path) -> None:
    for module, name in ((scripted(kind), "the model"), (nn.Sequential(nn.ReLU(), scripted(kind)).eval(), "the part '1'")):
        expected = rf"^{name} is a TorchScript module, which has no Python code; pass the module that .*load_state_dict\("
        with pytest.raises(ExportError, match=expected) as raised:
            CALLS[call](module, tmp_path)
        assert "\n" not in str(raised.value)
        assert not list(tmp_path.iterdir())
