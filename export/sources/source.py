"""A user's source as a module with samples, and with the policy and record of its training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from halfserve.amp_core.policy import Policy
from halfserve.amp_core.recorder.beside_weights import read_training
from halfserve.amp_core.recorder.module_spans import OUTSIDE, ROOT
from halfserve.amp_core.recorder.record import Record, RecordEntry
from halfserve.export.export_errors import ExportError
from halfserve.export.samples import Samples
from halfserve.export.tasks.task import Task

GENERIC_MODULES = frozenset({"main", "model", "models", "net", "nets", "network", "networks"})


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model that can be exported.

    Attributes:
        module: The module in float32 and evaluation mode, on the CPU.
        samples: Inputs to verify on.
        name: The default name of the model.
        dynamic: Names of the sizes that vary, beside the batch's, by input and axis.
        policy: The autocast policy of its training.
        record: The record of its training.
        metadata: Entries for the metadata of the ONNX model.
        task: The task of the model; None if only its outputs are known.
        origin: Where it was fetched from, for the certificate; empty for a model on this disk.
    """

    module: nn.Module
    samples: Samples
    name: str
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    policy: Policy = field(default_factory=Policy)
    record: Record | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    task: Task | None = None
    origin: Mapping[str, str] = field(default_factory=dict)


def factory_name(factory: str) -> str:
    """Return the default name of a model made by `MODULE:FACTORY`: the last part of the module's name that is not generic.

    `halfserve.examples.digits.model:model` is `digits`. Where every part is generic, it is the factory's name.
    """
    module, _, function = factory.partition(":")
    specific = [part for part in module.split(".") if part not in GENERIC_MODULES and not part.startswith("_")]
    return repository_name(specific[-1] if specific else function)


def repository_name(text: str) -> str:
    """Return the text with what a repository's names may not hold replaced."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip("._-") or "model"


def with_training(source: Source, weights: Path, network: nn.Module, *, prefix: str = "") -> Source:
    """Return the source with the policy and the record that lie beside its weights, or in their checkpoint.

    The weights are those of `network`, which the source's module is or contains. `prefix` stands before the network's names in
    the trained module: `net.` for a module that has the network as `net`.

    Raises:
        ExportError: Policy or record are there and cannot be read.
    """
    try:
        policy, record = read_training(weights)
    except ValueError as error:
        raise ExportError(str(error)) from error
    source = replace(source, policy=policy or Policy())
    if record is None:
        return source
    own = {name for name, _ in network.named_modules(remove_duplicate=False)} | {ROOT, OUTSIDE}
    entries = list(_of_network(record, prefix))
    if not entries or not {entry.module for entry in entries} <= own:
        remark = f"the record of the training in {weights} is of another model, and was not used"
        return replace(source, samples=source.samples.noting(remark))
    place = next(name for name, part in source.module.named_modules() if part is network)
    moved = tuple(replace(entry, module=_below(place, entry.module)) for entry in entries)
    return replace(source, record=replace(record, entries=moved))


def _of_network(record: Record, prefix: str) -> Iterator[RecordEntry]:
    """Yield the entries of a network in a trained module, by the network's own names; all where there is no prefix."""
    for entry in record.entries:
        if not prefix:
            yield entry
        elif f"{entry.module}." == prefix:
            yield replace(entry, module=ROOT)
        elif entry.module.startswith(prefix):
            yield replace(entry, module=entry.module.removeprefix(prefix))


def _below(place: str, name: str) -> str:
    """Return the name of a network's module in the module that has the network at `place`."""
    if not place or name == OUTSIDE:
        return name
    return place if name == ROOT else f"{place}.{name}"
