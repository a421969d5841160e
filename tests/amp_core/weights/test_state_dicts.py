from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from halfserve.amp_core.weights.file_kinds import WeightsError
from halfserve.amp_core.weights.state_dicts import load_into, load_weights


def made() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


WEIGHTS = made().state_dict()


def prefixed(prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in WEIGHTS.items()}


def _sharded(folder: Path, save: Callable[[dict[str, Tensor], Path], None], name: str) -> Path:
    shards = {f"part-{index}": {key: tensor} for index, (key, tensor) in enumerate(WEIGHTS.items())}
    for shard, tensors in shards.items():
        save(tensors, folder / shard)
    index = folder / name
    index.write_text(json.dumps({"weight_map": {key: shard for shard, tensors in shards.items() for key in tensors}}))
    return index


def _in_folder(folder: Path) -> Path:
    save_file(WEIGHTS, folder / "model.safetensors")
    return folder


def _saved(folder: Path, content: Any, name: str = "w.pt") -> Path:
    torch.save(content, folder / name)
    return folder / name


def _old_format(folder: Path) -> Path:
    torch.save(WEIGHTS, folder / "w.pth", _use_new_zipfile_serialization=False)
    return folder / "w.pth"


FORMS: dict[str, Callable[[Path], Path]] = {
    "safetensors in a folder": _in_folder,
    "safetensors": lambda folder: _in_folder(folder) / "model.safetensors",
    "sharded safetensors": lambda folder: _sharded(folder, save_file, "model.safetensors.index.json"),
    "sharded torch files": lambda folder: _sharded(folder, torch.save, "pytorch_model.bin.index.json").parent,
    "a state dict": lambda folder: _saved(folder, WEIGHTS),
    "a state dict in the old format": _old_format,
    "a lightning checkpoint": lambda folder: _saved(
        folder,
        {"epoch": 3, "state_dict": {f"model.{name}": tensor for name, tensor in WEIGHTS.items()}, "optimizer_states": []},
    ),
    "a checkpoint with a step": lambda folder: _saved(folder, {"step": 9, "model_state": WEIGHTS, "optimizer_state": {}}),
    "a training program's checkpoint": lambda folder: _saved(
        folder,
        {
            "model_state_dict": {f"module._orig_mod.{name}": tensor for name, tensor in WEIGHTS.items()},
            "optimizer": {"state": {}},
        },
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_any_form_come_into_the_module(form: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    assert load_into(module, load_weights(FORMS[form](tmp_path)), "w") == ""
    torch.testing.assert_close(module.state_dict(), WEIGHTS)


def test_narrow_weights_become_float32_with_a_note() -> None:
    module = made()
    note = load_into(
        module, {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in WEIGHTS.items()}, "w"
    )
    assert note == "the weights in w are bfloat16, and were converted from there"
    assert {tensor.dtype for tensor in module.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"0.bias": None}, "do not fit the Sequential: 1 of the module's tensors are missing \\(0.bias\\)"),
        ({"2.weight": torch.rand(2)}, "1 tensors are none of the module's \\(2.weight\\)"),
        ({"0.weight": torch.rand(5, 4)}, "'0.weight' has shape \\[5, 4\\], the module's \\[3, 4\\]"),
    ],
)
def test_weights_of_another_module_are_refused(change: dict[str, Tensor | None], text: str) -> None:
    given = {name: tensor for name, tensor in ({**WEIGHTS, **change}).items() if tensor is not None}
    module = made()
    with pytest.raises(WeightsError, match=text):
        load_into(module, given, "w.safetensors")
    torch.testing.assert_close(module.state_dict(), WEIGHTS)


def _cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-20])
    return path


def _index(folder: Path, content: Any) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(content))
    return path


DAMAGED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing": (lambda folder: folder / "w.pt", "there are no weights at .*w.pt"),
    "an empty folder": (lambda folder: folder, "holds no weights; expected one of"),
    "cut safetensors": (lambda folder: _cut(FORMS["safetensors"](folder)), "is no whole safetensors file: .*; copy or"),
    "a cut archive": (lambda folder: _cut(FORMS["a state dict"](folder)), "is a damaged archive; expected weights"),
    "a module": (lambda folder: _saved(folder, made()), "is a pickle with more than tensors, .*--trust-pickle"),
    "numbers": (lambda folder: _saved(folder, {"epoch": 1}), "holds no state dict"),
    "an index of nothing": (lambda folder: _index(folder, []), "is no index of sharded weights"),
    "a missing shard": (lambda folder: _index(folder, {"weight_map": {"a": "b.safetensors"}}), "names b.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGED)
def test_files_that_hold_no_weights_are_refused_in_one_line(damage: str, tmp_path: Path) -> None:
    make, text = DAMAGED[damage]
    with pytest.raises(WeightsError, match=text) as refused:
        load_weights(make(tmp_path))
    assert "\n" not in str(refused.value)


def test_the_modules_tensors_are_found_in_any_wrapper() -> None:
    module = made()
    note = load_into(module, {**prefixed("head.classifier."), "loss.weight": torch.ones(2)}, "w.ckpt")
    assert note == "1 tensors in w.ckpt are not the module's, such as loss.weight, and were left out"
    torch.testing.assert_close(module.state_dict(), WEIGHTS)


def test_two_candidates_in_a_wrapper_are_refused() -> None:
    with pytest.raises(WeightsError, match="do not fit the Sequential: 7 of the module's tensors are missing"):
        load_into(made(), {**prefixed("student."), **prefixed("teacher.")}, "w.ckpt")
