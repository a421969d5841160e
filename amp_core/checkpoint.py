"""The checkpoint file: training writes it, `halfserve export` reads it, and `--resume` continues from it."""

from __future__ import annotations

import errno
import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Sized
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from halfserve.amp_core.factory import call_factory, one_line
from halfserve.files.atomic_files import atomic_file

# Raised by torch.load for bytes that are no archive, a truncated archive, or an archive with more than data in it.
UNREADABLE = (
    OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, AttributeError, ImportError,
    TypeError,
)  # fmt: skip
_KNOWN = {type(None), bool, int, float, complex, str, bytes, Tensor, nn.Parameter, torch.dtype, torch.device, torch.Size}


def first_unreadable(value: Any, place: str) -> str | None:
    """Return the place and type of the first value that torch.load(weights_only=True) would refuse, such as a numpy scalar, or
    None.

    `place` is the name of the whole value, whose tensors are not copied.
    """
    if type(value) in _KNOWN:
        return None
    if type(value) not in {dict, OrderedDict, list, tuple}:
        return None if _is_readable(value) else f"{place}, a {type(value).__module__}.{type(value).__qualname__}"
    return next(filter(None, (first_unreadable(part, where) for part, where in _parts(value, place))), None)


def _parts(value: Any, place: str) -> Iterator[tuple[Any, str]]:
    if not isinstance(value, dict):
        yield from ((part, f"{place}.{index}") for index, part in enumerate(value))
        return
    for key, part in value.items():
        yield key, f"a key of {place}"
        yield part, f"{place}.{key}"


def _is_readable(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (*UNREADABLE, pickle.PicklingError):
        return False
    return True


FORMAT = "halfserve.checkpoint"
FORMAT_VERSION = 2  # 2 may lie within an epoch: what reads 1 alone would train that epoch's beginning twice


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, foreign, too new, or does not fit its model or data."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything needed to rebuild a model, continue its training, or convert it.

    Attributes:
        model: `MODULE:FACTORY` of a function that returns the untrained `nn.Module`.
        data: `MODULE:FACTORY` of a function that returns the pair (training set, held-out set).
        weights: The model's `state_dict`: float32 tensors and integer buffers, on the CPU, and modules' extra state.
        optimizer: The optimizer's `state_dict`.
        scheduler: The learning-rate scheduler's `state_dict`.
        scaler: The `GradScaler`'s `state_dict`; empty without loss scaling.
        policy: The autocast policy's string form.
        dtype: The dtype of the training: `float16`, `bfloat16` or `float32`.
        epoch: The number of complete epochs.
        step: The number of attempted optimizer steps, skipped ones included.
        rng: States of the random generators: torch's by device type, as uint8 tensors, Python's and numpy's.
        metrics: The last evaluation's figures by name, such as `accuracy` (a fraction) and `loss`; empty before the first.
        versions: Version of each library that shaped the result, by name.
        settings: The other settings of the run by name; `--resume` compares them with its own.
        batch: The number of completed batches of the next epoch.
        other_ranks: The states of the random generators, as in `rng`, for the other ranks of a run in several processes, from
            1.
        record: Operations with dtypes and ranges, as `halfserve.amp_core.recorder` reads it; empty if nothing was recorded.
    """

    model: str
    data: str
    weights: dict[str, Any]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    scaler: dict[str, Any]
    policy: str
    dtype: str
    epoch: int
    step: int
    rng: dict[str, Any]
    metrics: dict[str, float]
    versions: dict[str, str]
    settings: dict[str, str | int | float] = field(default_factory=dict)
    batch: int = 0
    other_ranks: list[dict[str, Any]] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)

    def build_model(self) -> nn.Module:
        """Build the model, in evaluation mode, on the CPU, in float32, with the trained weights.

        Raises:
            FactoryError: If the factory cannot be imported or called.
            CheckpointError: If it returns no module, or one that the weights do not fit.
        """
        model = call_factory(self.model)
        if not isinstance(model, nn.Module):
            raise CheckpointError(f"{self.model!r} returned a {type(model).__name__}; expected a torch.nn.Module")
        load_weights(model, self.weights, self.model)
        return model.eval()

    def build_data(self) -> tuple[Dataset[Any], Dataset[Any]]:
        """Build the training set and the held-out set, whose items are pairs (input, target).

        The held-out set has a length and can be indexed; the training set may be iterable only.

        Raises:
            FactoryError: If the factory cannot be imported or called.
            CheckpointError: If it returns anything else, or a set without items.
        """
        return build_data(self.data)


def load_weights(model: nn.Module, weights: dict[str, Any], spec: str) -> None:
    """Load weights into the model that `spec` builds.

    Raises:
        CheckpointError: If they do not fit; names the first difference.
    """
    try:
        model.load_state_dict(weights)
    except Exception as error:  # torch raises anything for values that are no weights
        mismatch = " ".join(str(error).split("\n\t")[1:2]) or str(error)
        raise CheckpointError(f"the weights do not fit the model that {spec!r} builds: {mismatch.strip()}") from error


def build_data(spec: str, *, held_out_indexable: bool = True) -> tuple[Dataset[Any], Dataset[Any]]:
    """Call a data factory and check what it returns; see `Checkpoint.build_data`.

    With `held_out_indexable`, a held-out set that can only be iterated over is refused.
    """
    data = call_factory(spec)
    if not isinstance(data, tuple) or len(data) != 2 or not all(isinstance(part, Dataset) for part in data):
        kinds = ", ".join(type(part).__name__ for part in data) if isinstance(data, tuple) else ""
        shape = f"a tuple of ({kinds})" if isinstance(data, tuple) else f"a {type(data).__name__}"
        raise CheckpointError(f"{spec!r} returned {shape}; expected a pair of torch data sets (training, held out)")
    training, held_out = data
    _check_data_set(training, f"the training set that {spec!r} returned", indexable=False)
    _check_data_set(held_out, f"the held-out set that {spec!r} returned", indexable=held_out_indexable)
    return data


def _check_data_set(data: Dataset[Any], name: str, *, indexable: bool) -> None:
    if isinstance(data, IterableDataset):
        if indexable:
            raise CheckpointError(f"{name} is an IterableDataset; expected one with a length, whose items can be indexed")
        return
    if not isinstance(data, Sized):
        either = "" if indexable else ", or an IterableDataset"
        raise CheckpointError(f"{name} has no length; expected a data set with __len__{either}")
    try:
        items = len(data)
    except Exception as error:  # user code
        raise CheckpointError(f"{name} does not say its length: len() raised {one_line(error)}") from error
    if not items:
        raise CheckpointError(f"{name} has no items; expected at least one")


def save_checkpoint(path: Path | str, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically: a reader sees the old file or the whole new one.

    Raises:
        CheckpointError: If the folder is missing or cannot be written to, the disk is full, or the checkpoint contains a value
            that could not be read back.
    """
    content = {entry.name: getattr(checkpoint, entry.name) for entry in fields(checkpoint)}
    require_readable(content)
    try:
        with atomic_file(path) as file:
            torch.save({"format": FORMAT, "format_version": FORMAT_VERSION, **content}, file)
    except (OSError, RuntimeError) as error:
        # torch reports the failed closing of its archive; the context has the reason of the failed write.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        raise CheckpointError(f"cannot write the checkpoint {path}: {reason.strerror or reason}") from error


def require_readable(content: dict[str, Any]) -> None:
    """Refuse values that `load_checkpoint` would refuse, among a checkpoint's fields by name.

    Raises:
        CheckpointError: If there is anything but tensors, numbers and strings, in containers; names the value and its place.
    """
    for name, value in content.items():
        unreadable = first_unreadable(value, name)
        if unreadable:
            raise CheckpointError(
                f"no checkpoint can hold {unreadable}: it would not be read back; expected tensors, Python's own numbers and "
                "strings, and lists, tuples and dicts of them"
            )


def load_checkpoint(path: Path | str) -> Checkpoint:
    """Read a checkpoint. Runs no code from the file: tensors, numbers, strings and containers only.

    Args:
        path: A file that `save_checkpoint` wrote.

    Returns:
        The checkpoint, its tensors on the CPU.

    Raises:
        CheckpointError: With one line, if the file is missing, truncated, foreign or of a newer format.
    """
    path = Path(path)
    content = _read(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} holds no halfserve checkpoint; expected a file that `halfserve train` wrote")
    version = content.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has checkpoint format {version}, this version of halfserve reads up to {FORMAT_VERSION}; upgrade halfserve"
        )
    return _checkpoint_from(content, path)


def _read(path: Path) -> Any:
    try:
        exists, is_folder = path.exists(), path.is_dir()
    except OSError as error:
        raise _refused(path, error) from error
    if not exists:
        raise CheckpointError(f"there is no checkpoint at {path}; `halfserve train` writes one")
    if is_folder:
        raise CheckpointError(f"{path} is a folder; expected the file in it, such as {path / 'checkpoint.pt'}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        # A system error says nothing about the file, except EINVAL: a damaged archive makes torch seek to an invalid offset.
        if isinstance(error, OSError) and error.errno not in {None, errno.EINVAL}:
            raise _refused(path, error) from error
        raise CheckpointError(f"{path} is damaged or no checkpoint; write it again with `halfserve train`") from error


def _refused(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot read the checkpoint {path}: {error.strerror or error}")


def _checkpoint_from(content: dict[str, Any], path: Path) -> Checkpoint:
    values = {entry.name: content[entry.name] for entry in fields(Checkpoint) if entry.name in content}
    needed = {entry.name for entry in fields(Checkpoint) if entry.default is MISSING and entry.default_factory is MISSING}
    missing = sorted(needed - values.keys())
    if missing:
        raise CheckpointError(f"the checkpoint {path} lacks {', '.join(missing)}; write it again with `halfserve train`")
    kinds: dict[str, type] = dict.fromkeys(("model", "data", "policy", "dtype"), str)
    kinds |= dict.fromkeys(("epoch", "step", "batch"), int) | {"other_ranks": list}
    for name, value in values.items():
        expected = kinds.get(name, dict)
        if not isinstance(value, expected) or isinstance(value, bool):
            raise CheckpointError(f"the checkpoint {path} has {name} as {type(value).__name__}, expected {expected.__name__}")
        if isinstance(value, int) and value < 0:
            raise CheckpointError(f"the checkpoint {path} has {name} {value}, expected 0 or above")
    return Checkpoint(**values)
