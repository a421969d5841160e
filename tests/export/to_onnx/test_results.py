from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from export.errors import ExportError
from export.to_onnx.results import named_tensors

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
