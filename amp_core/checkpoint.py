"""The file in which training hands a model on: what export reads, and what `--resume` goes on from."""

from __future__ import annotations

import errno
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from amp_core.atomic_file import atomic_file
from amp_core.data.errors import one_line
from amp_core.factory import call_factory
from amp_core.readable import UNREADABLE, first_unreadable

FORMAT = "halfserve.checkpoint"
FORMAT_VERSION = 2  # 2 may lie within an epoch: what reads 1 alone would train that epoch's beginning twice


class CheckpointError(ValueError):
    """A checkpoint that is missing, broken, foreign, too new, or does not fit its model or data."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything that is needed to rebuild a model, go on training it, or convert it.

    Attributes:
        model: `MODULE:FACTORY` of a function that returns the untrained `nn.Module`.
        data: `MODULE:FACTORY` of a function that returns the pair (training set, held-out set).
        weights: The model's `state_dict`: float32 tensors and integer buffers, on the CPU, and modules' extra state.
        optimizer: The optimizer's `state_dict`.
        scheduler: The learning-rate scheduler's `state_dict`.
        scaler: The `GradScaler`'s `state_dict`; empty where nothing was scaled.
        policy: The autocast policy in its string form, which `Policy.parse` reads.
        dtype: The name of the low-precision dtype trained with: `float16`, `bfloat16` or `float32`.
        epoch: How many epochs are complete.
        step: How many optimizer steps were attempted, skipped ones included.
        rng: States of the random generators: torch's by device type, as uint8 tensors, Python's and numpy's.
        metrics: The last evaluation's figures by name, such as `accuracy` (a fraction) and `loss`; empty before the first.
        versions: Version of each library that shaped the result, by name.
        settings: The other choices of the training run by name; `--resume` compares them with its own.
        batch: How many batches of the next epoch are done.
        other_ranks: What `rng` is for rank 0, for the ranks from 1 on of a run in several processes.
        record: Which operation ran in which dtype and range, as `amp_core.recorder` reads it; empty if nothing was recorded.
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
        """Build the model and load the trained weights into it.

        Returns:
            The model in evaluation mode, on the CPU, in float32.

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
        """Build the training set and the held-out set.

        Returns:
            Two data sets whose items are pairs (input, target). The held-out set has a length and can be indexed; the training
            set may be iterable only.

        Raises:
            FactoryError: If the factory cannot be imported or called.
            CheckpointError: If it returns anything else, or a set without items.
        """
        return build_data(self.data)


def load_weights(model: nn.Module, weights: dict[str, Any], spec: str) -> None:
    """Load weights into the model that `spec` builds.

    Raises:
        CheckpointError: If they are those of another model; says where they differ first.
    """
    try:
        model.load_state_dict(weights)
    except Exception as error:  # whatever torch stumbles over in what need not be weights at all
        mismatch = " ".join(str(error).split("\n\t")[1:2]) or str(error)
        raise CheckpointError(f"the weights do not fit the model that {spec!r} builds: {mismatch.strip()}") from error


def build_data(spec: str, *, held_out_indexable: bool = True) -> tuple[Dataset[Any], Dataset[Any]]:
    """Call a data factory and check what it returns; see `Checkpoint.build_data`.

    Args:
        spec: `MODULE:FACTORY`.
        held_out_indexable: Whether to refuse a held-out set that can only be iterated over.
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
    if not hasattr(data, "__len__"):
        either = "" if indexable else ", or an IterableDataset"
        raise CheckpointError(f"{name} has no length; expected a data set with __len__{either}")
    try:
        items = len(data)
    except Exception as error:  # whatever the user's code raises
        raise CheckpointError(f"{name} does not say its length: len() raised {one_line(error)}") from error
    if not items:
        raise CheckpointError(f"{name} has no items; expected at least one")


def save_checkpoint(path: Path | str, checkpoint: Checkpoint) -> None:
    """Write a checkpoint so that a reader sees the old file or the whole new one.

    Raises:
        CheckpointError: If the folder is missing or cannot be written to, the disk is full, or there is something in the
            checkpoint that could not be read back.
    """
    content = {entry.name: getattr(checkpoint, entry.name) for entry in fields(checkpoint)}
    require_readable(content)
    try:
        with atomic_file(path) as file:
            torch.save({"format": FORMAT, "format_version": FORMAT_VERSION, **content}, file)
    except (OSError, RuntimeError) as error:
        # torch closes its archive whatever happened, and tells of the closing; why the file took no more is the context.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        raise CheckpointError(f"cannot write the checkpoint {path}: {reason.strerror or reason}") from error


def require_readable(content: dict[str, Any]) -> None:
    """Refuse what `load_checkpoint` would refuse, while nothing is lost yet.

    Args:
        content: Fields of a checkpoint by name.

    Raises:
        CheckpointError: If there is anything in them but tensors, numbers and strings, in containers; says what and where.
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
        # What the system refuses says nothing of the file; but it refuses also to go where a damaged one would have it go.
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
