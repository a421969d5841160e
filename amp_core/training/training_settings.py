"""The settings of a training run, and the errors that end one."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from halfserve.amp_core.policy import Policy


class TrainingError(RuntimeError):
    """A run cannot start or continue, for a reason that its user can fix."""


class PeerError(TrainingError):
    """Another process of the run failed first, and reports why."""


DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
# A resumed run gives the result of an uninterrupted one only if these are equal; the others may change.
_PART_OF_THE_RESULT = (
    "loss", "epochs", "batch_size", "accumulate", "steps_per_epoch", "optimizer", "learning_rate", "clip", "seed"
)  # fmt: skip


_step = partial(typer.Option, rich_help_panel="Each step")
_length = partial(typer.Option, rich_help_panel="How long, and where")
KEPT = "What is kept"
_kept = partial(typer.Option, rich_help_panel=KEPT)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of a training run, as the command line, the environment or a config file gives them.

    A training set without a length needs `steps_per_epoch`, because the learning-rate schedule depends on the number of all
    steps. The learning rate warms up over a twentieth of the steps and then falls like a cosine.
    """

    model: Annotated[str, typer.Argument(help="MODULE:FACTORY of a function that returns the torch.nn.Module.")]
    data: Annotated[str, typer.Option(help="MODULE:FACTORY of a function that returns (training set, held-out set).")]
    out: Annotated[Path, typer.Option(help="Folder for checkpoint.pt, model.safetensors and train.jsonl.")]
    weights: Annotated[
        Path | None,
        typer.Option(help="Weights a new run starts from: .safetensors, .pt, .pth, sharded, or a folder of them."),
    ] = None
    loss: Annotated[str, _step(help="MODULE:FUNCTION (output, target) -> scalar.")] = "torch.nn.functional:cross_entropy"
    optimizer: Annotated[str, _step(help="MODULE:FACTORY (parameters, lr=...) -> optimizer.")] = "torch.optim:AdamW"
    dtype: Annotated[
        Literal["float16", "bfloat16", "float32"], _step(help="float16 scales the loss; float32 trains without autocast.")
    ] = "float16"
    epochs: Annotated[int, _length(min=1, help="Passes over the training set.")] = 20
    steps_per_epoch: Annotated[
        int, _length(min=0, help="Steps after which an epoch ends at the latest; needed for a set without a length.")
    ] = 0
    batch_size: Annotated[int, _step(min=1, help="Items of one batch, in each process.")] = 64
    accumulate: Annotated[int, _step(min=1, help="Batches per optimizer step.")] = 1
    learning_rate: Annotated[float, _step(help="Highest learning rate of the schedule, a warm-up and a cosine.")] = 3e-3
    clip: Annotated[float, _step(min=0.0, help="Largest gradient norm; 0 does not clip.")] = 1.0
    seed: Annotated[
        int, _length(min=0, help="Seed of the weights, of the order of the data, and of all other random numbers.")
    ] = 0
    device: Annotated[str, _length(help="auto, cpu, cuda, cuda:1, ...")] = "auto"
    policy: Annotated[str, _step(help="Which operation runs in which dtype: native, cuda, cuda+fp32:einsum,...")] = "native"
    workers: Annotated[int, _length(min=0, help="Processes that load data; 0 loads it in the training process.")] = 0
    checkpoint_every: Annotated[
        int, _kept(min=0, help="Steps between checkpoints; 0 writes one at the end of each epoch only.")
    ] = 0
    patience: Annotated[
        int,
        _length(
            min=1, help="Number of consecutive steps, skipped or without a finite loss, after which the cause is searched for."
        ),
    ] = 10
    record: Annotated[bool, _kept("--record", help="Record dtypes and ranges of all operations in record.json.")] = False
    record_every: Annotated[int, _kept(min=1, help="Steps between two that --record records.")] = 200
    tensorboard: Annotated[bool, _kept("--tensorboard", help="Write curves into OUT/tensorboard.")] = False


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(TrainingOptions):
    """The options of a training run, checked.

    Raises:
        TrainingError: If a value is out of its range.
        PolicyError: If the policy cannot be read.
    """

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in ("epochs", "batch_size", "accumulate", "patience", "record_every"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name, zero in (
            ("steps_per_epoch", "as many as there are"),
            ("workers", "batches are made in this process"),
            ("checkpoint_every", "at the end of each epoch only"),
        ):
            _require(getattr(self, name) >= 0, f"{name} must be 0 ({zero}) or above, got {getattr(self, name)}")
        _require(0 < self.learning_rate < math.inf, f"learning_rate must be above 0 and finite, got {self.learning_rate}")
        _require(self.clip >= 0, f"clip must be 0 (no clipping) or above, got {self.clip}")
        _require(0 <= self.seed < 2**63, f"seed must be between 0 and 2**63 - 1, got {self.seed}")
        Policy.parse(self.policy)

    def to_checkpoint(self) -> dict[str, str | int | float]:
        """Return the settings that affect the result and have no field of their own in a checkpoint."""
        values: dict[str, Any] = asdict(self)
        return {name: values[name] for name in _PART_OF_THE_RESULT}


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise TrainingError(otherwise)
