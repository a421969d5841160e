"""State dicts in files of all usual formats, and how they are loaded into a module."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from halfserve.amp_core.checkpoint import FORMAT, UNREADABLE
from halfserve.amp_core.weights.file_kinds import FileKind, WeightsError, kind_of
from halfserve.files.atomic_files import atomic_file

# Keys under which training programs store a model's weights in their checkpoints.
WRAPPERS = ("state_dict", "model_state_dict", "model_state", "model", "weights", "module", "net")
# Prefixes that wrappers of modules (DataParallel, torch.compile, LightningModule) add to the names.
PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = ("model.safetensors", "pytorch_model.bin", "weights.safetensors")
SHOWN = 3


def load_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file or folder by name; runs no code from it.

    The file is a .safetensors file, one of torch.save with a state dict, alone or in a training program's checkpoint, or the
    index of a sharded one; a folder has one of these under its usual name, as accelerate and transformers write it.

    Raises:
        WeightsError: It cannot be read, or holds no state dict.
    """
    if path.is_dir():
        found = weight_files(path)
        if not found:
            raise WeightsError(f"{path} holds no weights; expected one of {', '.join((*INDEXES, *SINGLE))}")
        path = found[0]
    if path.name.endswith(".index.json"):
        return _sharded(path)
    if not path.exists():
        raise WeightsError(
            f"there are no weights at {path}; expected a .safetensors file, or one of torch.save with a state dict"
        )
    kind = kind_of(path)
    if kind is FileKind.SAFETENSORS:
        return _safetensors(path)
    if kind not in (FileKind.TORCH_ARCHIVE, FileKind.PICKLE):
        raise WeightsError(
            f"{path} is {kind.value}; expected weights: a .safetensors file, or one of torch.save with a state dict"
        )
    tensors = _state_dict(torch_content(path))
    if tensors is None:
        raise WeightsError(f"{path} holds no state dict: no dict of tensors, alone or under {', '.join(WRAPPERS)}")
    return tensors


def save_weights(path: Path, weights: Mapping[str, Any]) -> None:
    """Write the tensors of a state dict as safetensors; atomically. A module's extra state, which is no tensor, is left out.

    Raises:
        OSError: The file cannot be written.
    """
    # Copies, because the format does not support tensors that share memory, such as tied weights.
    tensors = {
        name: value.detach().clone(memory_format=torch.contiguous_format)
        for name, value in weights.items()
        if isinstance(value, Tensor)
    }
    with atomic_file(path) as file:
        file.write(save(tensors))


def load_into(module: nn.Module, weights: Mapping[str, Tensor], place: str) -> str:
    """Load weights into a module; all tensors of the module must be given, and no others.

    See `prefix_of` for the names in a wrapper, such as a LightningModule; `place` is the source of the weights, for errors.

    Returns:
        A note for the certificate about dtypes other than float32, and about tensors that the wrapper has besides the module's.

    Raises:
        WeightsError: They do not fit; names the first differences.
    """
    wanted = module.state_dict()
    given = without_prefix(weights, wanted)
    # Buffers such as position ids, which can be computed again, were saved by some versions of a library and not by others.
    unsaved = {name for name, _ in module.named_buffers()} - wanted.keys()
    missing, unexpected = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys() - unsaved)
    if missing or unexpected:
        parts = [
            f"{len(names)} {what} ({', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''})"
            for names, what in (
                (missing, "of the module's tensors are missing"),
                (unexpected, "tensors are none of the module's"),
            )
            if names
        ]
        raise WeightsError(f"the weights in {place} do not fit the {type(module).__name__}: {'; '.join(parts)}")
    for name, tensor in wanted.items():
        if isinstance(tensor, Tensor) and tensor.shape != given[name].shape:
            raise WeightsError(
                f"the weights in {place} do not fit the {type(module).__name__}: {name!r} has shape "
                f"{list(given[name].shape)}, the module's {list(tensor.shape)}"
            )
    module.load_state_dict({name: given[name] for name in wanted})
    narrow = sorted({str(t.dtype)[6:] for t in given.values() if t.is_floating_point() and t.dtype.itemsize < 4})
    types = f"the weights in {place} are {' and '.join(narrow)}, and were converted from there" if narrow else ""
    left = sorted(weights.keys() - {f"{prefix_of(weights, wanted)}{name}" for name in given})
    beside = f"{len(left)} tensors in {place} are not the module's, such as {left[0]}, and were left out" if left else ""
    return "; ".join(filter(None, (types, beside)))


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights in a folder under their usual names, indexes of sharded ones first."""
    return [folder / name for name in (*INDEXES, *SINGLE) if (folder / name).is_file()]


def torch_content(path: Path) -> Any:
    """Return the content of a file written by torch.save, if it has only tensors and plain containers.

    Raises:
        WeightsError: The file is damaged, or holds anything else.
    """
    try:
        return _plain_content(path, "cpu")
    except UNREADABLE as error:
        text = str(error)
        if "Unsupported global" in text or "Unsupported class" in text or "weights_only" in text:
            raise WeightsError(
                f"{path} is a pickle with more than tensors, which may run any code when it is opened; save the state_dict "
                "alone, or give --trust-pickle where you trust the file"
            ) from error
        raise WeightsError(f"{path} is damaged: torch.load cannot read it; copy or save it again") from error


def _plain_content(path: Path, device: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about pickles from other programs; those are refused in one line
        return torch.load(path, map_location=device, weights_only=True)


def is_checkpoint(path: Path) -> bool:
    """Return whether a file of torch.save is a checkpoint of `halfserve train`, or so damaged that only its reader can tell."""
    try:
        content = _plain_content(path, "meta")
    except UNREADABLE:
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def is_state_dict(path: Path) -> bool:
    """Return whether a file of torch.save holds a state dict."""
    try:
        return _state_dict(_plain_content(path, "meta")) is not None
    except UNREADABLE:
        return False


def described_weights(path: Path) -> str:
    """Return the number of tensors in a file of weights, and the first names.

    Raises:
        WeightsError: The file cannot be read.
    """
    names = list(load_weights(path))
    return f"{len(names)} tensors ({', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''})"


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(
            f"{path} is no whole safetensors file: {str(error).splitlines()[0]}; copy or download it again"
        ) from error


def _sharded(index: Path) -> dict[str, Tensor]:
    try:
        files = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        paths = [index.parent / Path(name).name for name in files]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is no index of sharded weights; expected a JSON object with weight_map") from error
    if absent := [path.name for path in paths if not path.is_file()]:
        raise WeightsError(f"{index} names {absent[0]}, which is not beside it; download all {len(paths)} files")
    return {name: tensor for path in paths for name, tensor in load_weights(path).items()}


def _state_dict(content: Any) -> dict[str, Tensor] | None:
    """Return the state dict in a file's content; None if it has none."""
    if not isinstance(content, Mapping):
        return None
    if content and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()):
        return dict(content)
    found = (_state_dict(content[name]) for name in WRAPPERS if name in content)
    return next((tensors for tensors in found if tensors is not None), None)


def prefix_of(names: Collection[str], wanted: Collection[str]) -> str:
    """Return the prefix that a wrapper put before the names of the module's tensors, such as `model.` or `net._orig_mod.`.

    If exactly one prefix precedes the names of all of the module's tensors (`wanted`), it is returned, even if the wrapper has
    other tensors too. Otherwise it consists of those `PREFIXES` that all names begin with and no name of the module does.
    """
    given = set(names)
    if given >= set(wanted):
        return ""
    first = min(wanted)
    possible = {name.removesuffix(first) for name in given if name.endswith(f".{first}")}
    whole = [prefix for prefix in possible if all(f"{prefix}{name}" in given for name in wanted)]
    if len(whole) == 1:
        return whole[0]
    prefix = ""
    while found := next((part for part in PREFIXES if all(name.startswith(prefix + part) for name in given)), None):
        if not given or any(name.startswith(found) for name in wanted):
            break
        prefix += found
    return prefix


def without_prefix(weights: Mapping[str, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors under `prefix_of`, by their names in the module."""
    prefix = prefix_of(weights, wanted)
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
