"""A user's source as a module with samples, and the choice of its reader."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from halfserve.amp_core.policy import Policy
from halfserve.amp_core.recorder import Record
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
    """

    module: nn.Module
    samples: Samples
    name: str
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    policy: Policy = field(default_factory=Policy)
    record: Record | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    task: Task | None = None


def factory_name(factory: str) -> str:
    """The default name of a model made by `MODULE:FACTORY`: the last part of the module's name that is not generic.

    `halfserve.examples.digits.model:model` is `digits`. Where every part is generic, it is the factory's name.
    """
    module, _, function = factory.partition(":")
    specific = [part for part in module.split(".") if part not in GENERIC_MODULES and not part.startswith("_")]
    return repository_name(specific[-1] if specific else function)


def repository_name(text: str) -> str:
    """The text with what a repository's names may not hold replaced."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text).lstrip("._-") or "model"
