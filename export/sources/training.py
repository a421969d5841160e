"""Results of a training that are stored with its weights: the autocast policy, and the record in the source module's names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import nn

from halfserve.amp_core.policy import Policy
from halfserve.amp_core.recorder.beside_weights import read_training
from halfserve.amp_core.recorder.module_spans import OUTSIDE, ROOT
from halfserve.amp_core.recorder.record import Record, RecordEntry
from halfserve.export.export_errors import ExportError
from halfserve.export.sources.source import Source


def with_training(source: Source, weights: Path, network: nn.Module, *, prefix: str = "") -> Source:
    """The source with the policy and the record that lie beside its weights, or in their checkpoint.

    Args:
        source: The source; its module is or contains `network`.
        weights: A file or folder.
        network: The module that the weights are of.
        prefix: The prefix of the network's names in the trained module: `net.` for a module that has the network as `net`.

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
    """The entries of a network in a trained module, by the network's own names; all where there is no prefix."""
    for entry in record.entries:
        if not prefix:
            yield entry
        elif f"{entry.module}." == prefix:
            yield replace(entry, module=ROOT)
        elif entry.module.startswith(prefix):
            yield replace(entry, module=entry.module.removeprefix(prefix))


def _below(place: str, name: str) -> str:
    """The name of a network's module in the module that has the network at `place`."""
    if not place or name == OUTSIDE:
        return name
    return place if name == ROOT else f"{place}.{name}"
