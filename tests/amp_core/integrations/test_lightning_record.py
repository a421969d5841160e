"""A checkpoint of Lightning's Trainer holds the policy and the record of its training, and export reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from halfserve.amp_core.integrations.lightning import TrainerPrecision
from halfserve.amp_core.recorder.beside_weights import read_training
from halfserve.amp_core.weights.file_kinds import WeightsError
from halfserve.export.export_errors import ExportError
from halfserve.export.module_pipeline import export_module
from halfserve.export.sources.opening import open_source
from halfserve.export.sources.source import Source
from halfserve.export.sources.source_options import SourceOptions
from tests.amp_core.integrations.plain import LIGHTNING, silence_loggers

pytestmark = LIGHTNING
silence_loggers()

NET = f"{__name__}:Net"
LARGE = 3e6


class Net(nn.Module):
    """One block goes beyond float16's range and comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.head(self.block(self.before(rows)) / LARGE)
        return found


class Task(pl.LightningModule):
    """A network under a name of its own, beside a loss that has a tensor too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.classifier = Net()
        with torch.no_grad():
            next(self.classifier.block.parameters()).fill_(LARGE)
        self.loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))

    def training_step(self, batch: Any, _: int) -> Tensor:
        rows, classes = batch
        loss: Tensor = self.loss(self.classifier(rows), classes)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def trained(folder: Path, task: pl.LightningModule, *, steps: int, resume: Path | None = None, **settings: Any) -> Path:
    rows = [(torch.rand(4) + 1, index % 2) for index in range(8)]
    trainer = pl.Trainer(
        plugins=[TrainerPrecision("bf16-mixed", **{"record_every": 1} | settings)],
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Any = DataLoader(rows, batch_size=8)  # type: ignore[arg-type]  # a list is a data set
    trainer.fit(task, data, ckpt_path=None if resume is None else str(resume), weights_only=True)
    path = folder / f"{steps}.ckpt"
    trainer.save_checkpoint(path)
    return path


def opened(checkpoint: Path, factory: str = NET) -> Source:
    samples = checkpoint.parent / "samples.npy"
    np.save(samples, np.random.default_rng(0).random((8, 4), np.float32) + 1)
    return open_source(factory, SourceOptions(weights=checkpoint, samples=samples))


def test_a_trained_network_keeps_in_float32_what_its_training_saw_overflow(tmp_path: Path) -> None:
    source = opened(trained(tmp_path, Task(), steps=2, policy="native+fp32:cumsum"))
    assert source.record is not None
    assert str(source.policy) == "native+fp32:cumsum"
    assert {entry.module for entry in source.record.entries} == {".", "before", "block.0", "block.1", "head"}
    assert "1 tensors in" in source.samples.note
    assert "loss.weight, and were left out" in source.samples.note
    done = export_module(
        source.module, source.samples.inputs, tmp_path / "models", "net", policy=source.policy, record=source.record
    )
    assert any("reached" in node.reason and "in training" in node.reason for node in done.report.kept)


def test_the_whole_module_keeps_the_names_of_its_parts(tmp_path: Path) -> None:
    checkpoint = trained(tmp_path, Task(), steps=1)
    policy, record = read_training(checkpoint)
    assert str(policy) == "native"
    assert record is not None
    assert "classifier.block.0" in {entry.module for entry in record.entries}


def test_a_resumed_training_continues_its_record(tmp_path: Path) -> None:
    first = trained(tmp_path, Task(), steps=1)
    _, record = read_training(trained(tmp_path, Task(), steps=3, resume=first))
    assert record is not None
    assert record.steps == 3


def test_a_record_of_another_model_is_not_used(tmp_path: Path) -> None:
    path = trained(tmp_path, Task(), steps=1)
    content = torch.load(path, weights_only=True)
    record = content["TrainerPrecision"]["record"]
    entries = [{**entry, "module": f"classifier.other{entry['module']}"} for entry in record["entries"]]
    content["TrainerPrecision"]["record"] = {**record, "entries": entries}
    torch.save(content, path)
    source = opened(path)
    assert source.record is None
    assert "is of another model, and was not used" in source.samples.note
    content["TrainerPrecision"]["record"] = {"format": "other"}
    torch.save(content, path)
    with pytest.raises(ExportError, match=r"cannot read the policy and record in the checkpoint .*1\.ckpt: not a record"):
        opened(path)


def test_two_networks_of_one_kind_leave_no_choice(tmp_path: Path) -> None:
    weights = Net().state_dict()
    twice = {f"{name}.{key}": tensor for name in ("student", "teacher") for key, tensor in weights.items()}
    torch.save({"state_dict": twice}, tmp_path / "both.ckpt")
    with pytest.raises((ExportError, WeightsError), match="do not fit the Net: 6 of the module's tensors are missing"):
        opened(tmp_path / "both.ckpt")


def test_no_batch_is_recorded_where_none_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="record_every is -1; expected a number of batches from 1, or 0 for no record"):
        TrainerPrecision("bf16-mixed", record_every=-1)
    _, record = read_training(trained(tmp_path, Task(), steps=1, record_every=0))
    assert record is None
