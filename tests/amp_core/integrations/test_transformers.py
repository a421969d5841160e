"""transformers' Trainer with our precision trains as a plain loop does, resumes, and ends in a model that is exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import TrainingArguments

from halfserve import GradScaler, autocast
from halfserve.amp_core.integrations.transformers import HalfserveTrainer
from halfserve.amp_core.recorder.beside_weights import RECORD_FILE, read_policy, read_record, write_record
from halfserve.amp_core.recorder.record import Record
from halfserve.export.export_errors import ExportError
from halfserve.export.half_module.fp32_modules import overflowing_modules
from halfserve.export.sources.hugging_face import open_hugging_face
from halfserve.export.sources.source_options import SourceOptions
from tests.amp_core.integrations.plain import silence_loggers
from tests.amp_core.integrations.test_accelerate import forget
from tests.export.hugging_face_folders import classifier_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

silence_loggers()
STEPS, BATCH, RATE = 6, 4, 0.05
MIXED = pytest.mark.parametrize(("setting", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])


@pytest.fixture(autouse=True)
def _fresh_process_state() -> Iterator[None]:
    """accelerate settles the precision once per process; each test is one."""
    forget()
    yield
    forget()


class Regression(nn.Module):
    """As the Trainer wants its models: the loss comes first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.layers(x)
        self.dtypes.append(out.dtype)
        return {"loss": (out.float() - labels).square().mean(), "logits": out}


class InOrder(HalfserveTrainer):
    """Takes the rows as the plain loop does."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        taken: Any = train_dataset or self.train_dataset
        return SequentialSampler(taken)


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS * BATCH, 5, generator=generator)
    return [{"x": row[:4], "labels": row[4:]} for row in inputs]


def scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def trainer(folder: Path, model: nn.Module, *, steps: int = STEPS, arguments: dict[str, Any], **own: Any) -> HalfserveTrainer:
    plain: dict[str, Any] = {
        "per_device_train_batch_size": BATCH, "learning_rate": RATE, "optim": "sgd", "lr_scheduler_type": "constant",
        "save_steps": 3, "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no",
    }  # fmt: skip
    chosen = TrainingArguments(str(folder), max_steps=steps, **plain, **arguments)
    return InOrder(model, chosen, train_dataset=rows(), **own)


def plain_loop(dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    model, data = Regression(), rows()
    optimizer, ours = torch.optim.SGD(model.parameters(), lr=RATE), scaler()
    for start in range(0, len(data), BATCH):
        batch = data[start : start + BATCH]
        inputs, labels = (torch.stack([row[name] for row in batch]) for name in ("x", "labels"))
        with autocast("cpu", dtype, policy="cuda"):
            loss = model(inputs, labels)["loss"]
        if dtype is torch.float16:
            loss = ours.scale(loss)
        torch.autograd.backward(loss)
        if dtype is torch.float16:
            ours.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if dtype is torch.float16:
            ours.step(optimizer)
            ours.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], ours.state_dict()


@MIXED
def test_it_trains_bit_for_bit_as_the_plain_loop(tmp_path: Path, setting: str, dtype: torch.dtype) -> None:
    model = Regression()
    own: dict[str, Any] = {"scaler": scaler()} if setting == "fp16" else {}
    made = trainer(tmp_path, model, arguments={setting: True}, policy="cuda", record_every=2, **own)
    made.train()
    parameters, state = plain_loop(dtype)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), parameters, strict=True))
    assert set(model.dtypes) == {dtype}
    if setting == "fp16":
        assert made.accelerator.scaler is not None
        assert made.accelerator.scaler.state_dict() == state
    made.evaluate(made.train_dataset)
    assert model.dtypes[-1] == dtype, "evaluation follows the same policy"


@pytest.mark.long
def test_it_resumes_with_its_scale_policy_and_record(tmp_path: Path) -> None:
    whole, resumed = Regression(), Regression()
    arguments = {"fp16": True}
    trainer(tmp_path / "whole", whole, arguments=arguments, policy="cuda", scaler=scaler(), record_every=1).train()
    forget()
    trainer(
        tmp_path / "half", Regression(), steps=3, arguments=arguments, policy="cuda", scaler=scaler(), record_every=1
    ).train()
    forget()
    saved = tmp_path / "half" / "checkpoint-3"
    assert str(read_policy(saved)) == "cuda"
    made = trainer(tmp_path / "half", resumed, arguments=arguments, policy="cuda", scaler=scaler(), record_every=1)
    made.train(resume_from_checkpoint=str(saved))
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), resumed.parameters(), strict=True))
    records = [read_record(tmp_path / name / "checkpoint-6") for name in ("whole", "half")]
    assert records[0] == records[1]
    forget()
    other = trainer(tmp_path / "half", Regression(), arguments=arguments, scaler=scaler())
    with pytest.warns(UserWarning, match="was trained with the policy 'cuda'; training goes on with"):
        other.train(resume_from_checkpoint=str(saved))


def test_each_training_records_the_model_that_it_made(tmp_path: Path) -> None:
    """With `model_init`, the Trainer makes another model than its first when it begins."""
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, bf16=True, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    made = HalfserveTrainer(None, arguments, model_init=Regression, train_dataset=rows(), record_every=1)
    made.train()
    made.save_model(str(tmp_path / "model"))
    record = read_record(tmp_path / "model")
    assert record is not None
    assert {"layers.0", "layers.2"} <= {entry.module for entry in record.entries}


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a policy or scaler needs mixed_precision='fp16' or 'bf16'"):
        trainer(tmp_path, Regression(), arguments={}, policy="cuda")
    with pytest.raises(ValueError, match="record_every is -1; expected a number of batches from 1, or 0 for no record"):
        trainer(tmp_path, Regression(), arguments={}, record_every=-1)


def test_export_reads_what_the_training_saw(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification  # noqa: PLC0415  (slow to import)

    folder = classifier_folder(tmp_path / "model", "BertForSequenceClassification")
    model = BertForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        model.get_parameter("bert.encoder.layer.0.intermediate.dense.weight").mul_(1e6)
    arguments = TrainingArguments(
        str(tmp_path / "runs"), max_steps=1, bf16=True, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    data = [{"input_ids": torch.arange(3, 9), "labels": index % 2} for index in range(8)]
    made = HalfserveTrainer(model, arguments, train_dataset=data, record_every=1)
    made.train()
    made.save_model(str(folder))
    source = open_hugging_face(folder, SourceOptions())
    found, _ = overflowing_modules(source.module, source.record)
    assert "network.bert.encoder.layer.0.intermediate" in found

    record = read_record(folder)
    assert record is not None
    entries = [{**entry.to_dict(), "module": f"other.{entry.module}"} for entry in record.entries]
    write_record(folder, Record.from_dict({**record.to_dict(), "entries": entries}))
    source = open_hugging_face(folder, SourceOptions())
    assert source.record is None
    assert "is of another model, and was not used" in source.samples.note

    (folder / RECORD_FILE).write_text(json.dumps({"format": "other"}))
    with pytest.raises(
        ExportError, match=r"cannot read the record in .*delete the file to load the rest without it: not a rec"
    ):
        open_hugging_face(folder, SourceOptions())
