"""Lets running sequences of a replaced version end on that version: the new version forwards their requests to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from halfserve.serve.engine.model import Model
from halfserve.serve.engine.sequences.sequence_scheduler import SequenceScheduler


def hand_over(before: Mapping[int, Model], models: Sequence[Model]) -> None:
    """Link the sequences of new versions to those of the version that clients used before, if both have the same interface.

    Args:
        before: the versions served so far.
        models: the versions served from now on.
    """
    for model in models:
        scheduler = model.scheduler
        old = before.get(model.version) or (before[max(before)] if before else None)
        if old is None or old is model or not isinstance(scheduler, SequenceScheduler) or scheduler.predecessor is not None:
            continue
        if model in before.values() or not isinstance(old.scheduler, SequenceScheduler):
            continue
        if (old.interface.inputs, old.interface.outputs) != (model.interface.inputs, model.interface.outputs):
            continue
        link(old.scheduler, scheduler)


def link(old: SequenceScheduler, new: SequenceScheduler) -> None:
    """Let `new` forward requests of running sequences to `old`. The version before `old` is released: at most two run."""
    if old.predecessor is not None:
        old.predecessor.let_go()
        old.predecessor = None
    if old.successor is not None:
        old.successor.predecessor = None
    old.successor, new.predecessor = new, old
