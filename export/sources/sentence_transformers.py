"""The modules of a sentence-transformers folder after the transformer: pooling, dense layers and normalisation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from halfserve.amp_core.weights.state_dicts import load_weights
from halfserve.export.export_errors import ExportError
from halfserve.export.tasks.served_models import Normalized, Pooling
from halfserve.export.to_onnx.capture import one_line

MODULES = "modules.json"
SPLADE = "SpladePooling"
SPLADE_SETTINGS = {"pooling_strategy": "max", "activation_function": "relu"}  # those that are known, of its config.json
# The flag of each way of pooling in 1_Pooling/config.json.
POOLINGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_lasttoken": "lasttoken",
}


def sentence_layers(folder: Path) -> tuple[Sequence[Pooling], Sequence[nn.Module]] | None:
    """Return how the folder's modules.json pools tokens, and the layers that follow; None where there is no such file.

    Raises:
        ExportError: A file cannot be read, or it names a module that is not known.
    """
    if not (folder / MODULES).is_file():
        return None
    poolings: list[Pooling] = []
    layers: list[nn.Module] = []
    for entry in _json(folder / MODULES, list):
        kind, place = str(entry.get("type", "")).rpartition(".")[2], folder / str(entry.get("path", ""))
        if kind == "Pooling":
            poolings = _poolings(place / "config.json")
        elif kind == "Dense":
            layers += _dense(place)
        elif kind == "Normalize":
            layers.append(Normalized())
        elif kind != "Transformer":
            raise ExportError(
                f"{folder / MODULES} names a {kind or 'module of no type'}; expected Transformer, Pooling, Dense and Normalize"
            )
    if not poolings:
        raise ExportError(f"{folder / MODULES} names no Pooling; give --task feature-extraction for the tokens' vectors")
    return poolings, layers


def is_sparse(folder: Path) -> bool:
    """Return whether the folder's modules.json says that its masked language model makes sparse embeddings (SPLADE).

    Raises:
        ExportError: A file cannot be read, or it asks for another pooling than the maximum of log(1 + relu(logits)).
    """
    if not (folder / MODULES).is_file():
        return False
    for entry in _json(folder / MODULES, list):
        if str(entry.get("type", "")).rpartition(".")[2] == SPLADE:
            path = folder / str(entry.get("path", "")) / "config.json"
            content = _json(path, dict)
            for name, expected in SPLADE_SETTINGS.items():
                if content.get(name, expected) != expected:
                    raise ExportError(f"{path} has the {name} {content[name]!r}; expected {expected!r}")
            return True
    return False


def _poolings(path: Path) -> list[Pooling]:
    flags = {name for name, value in _json(path, dict).items() if name.startswith("pooling_mode_") and value is True}
    if unknown := sorted(flags - POOLINGS.keys()):
        raise ExportError(f"{path} asks for {unknown[0]}; known are {', '.join(POOLINGS)}")
    return [how for flag, how in POOLINGS.items() if flag in flags]


def _dense(folder: Path) -> list[nn.Module]:
    content = _json(folder / "config.json", dict)
    name = str(content.get("activation_function", "torch.nn.modules.linear.Identity")).rpartition(".")[2]
    activation = getattr(nn, name, None)
    if activation is None:
        raise ExportError(f"{folder / 'config.json'} has the activation {name!r}; expected a module of torch.nn")
    try:
        linear = nn.Linear(content["in_features"], content["out_features"], bias=content.get("bias", True))
        weights = load_weights(folder)
        linear.load_state_dict({key.removeprefix("linear."): tensor.to(torch.float32) for key, tensor in weights.items()})
        return [linear, activation()]
    except Exception as error:  # a missing size, file or tensor, or one that does not fit
        raise ExportError(f"cannot load the dense layer in {folder}: {one_line(error)}") from error


def _json(path: Path, kind: type) -> Any:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"cannot read {path}: {one_line(error)}") from error
    if not isinstance(content, kind):
        raise ExportError(f"{path} holds a {type(content).__name__}; expected a {cast('Any', kind).__name__}")
    return content
