"""`HalfserveTrainer`: our autocast, policies, GradScaler and Recorder in the Trainer of transformers.

Example:
    from halfserve.amp_core.integrations.transformers import HalfserveTrainer

    HalfserveTrainer(model, TrainingArguments("runs", fp16=True), train_dataset=data, policy="cuda").train()
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from halfserve.amp_core.grad_scaler.grad_scaler import GradScaler
from halfserve.amp_core.integrations import not_installed
from halfserve.amp_core.integrations.accelerate import HalfserveAccelerator, compare_policy
from halfserve.amp_core.policy import Policy
from halfserve.amp_core.recorder import Record
from halfserve.amp_core.recorder.beside_weights import read_record, write_policy, write_record
from halfserve.amp_core.recorder.recorder import BatchRecorder

try:
    from transformers import Trainer, trainer
except ModuleNotFoundError as error:
    raise not_installed(error, "transformers", "5.20") from error


class HalfserveTrainer(Trainer):
    """A `Trainer` with this package's mixed precision; everything else is transformers' own.

    Beyond transformers: float16 on the CPU too; a policy; a scale within limits; and in each folder that it saves, the policy
    and a record of the ranges that training saw, which `halfserve export FOLDER` reads.

    Example:
        trainer = HalfserveTrainer(model, TrainingArguments("runs", fp16=True), train_dataset=data, policy="cuda")
        trainer.train()
        trainer.save_model("classifier")  # halfserve export classifier --repository models

    Args:
        *args: Arguments of `Trainer`.
        policy: The dtype of each operation, a `Policy` or its string form; by default torch's rules for the device.
        scaler: A scaler with other settings, such as `GradScaler(min_scale=1.0)`.
        record_every: One batch in `record_every` is recorded; 0 records none.
        **kwargs: Arguments of `Trainer`.

    Raises:
        ValueError: If `record_every` is negative; as `HalfserveAccelerator`, if policy or scaler need fp16=True or bf16=True.
        PolicyError: If a policy's string form cannot be read.
    """

    accelerator: HalfserveAccelerator

    def __init__(
        self,
        *args: Any,
        policy: Policy | str | None = None,
        scaler: GradScaler | None = None,
        record_every: int = 200,
        **kwargs: Any,
    ) -> None:
        self._batches = BatchRecorder(record_every)
        self._make_accelerator = partial(HalfserveAccelerator, policy=policy, scaler=scaler)
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, as transformers does with its own."""
        # transformers has no argument for the class; the instance gets the same arguments as otherwise.
        with patch.object(trainer, "Accelerator", self._make_accelerator):
            super().create_accelerator_and_postprocess()

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Compute the loss of one batch and run its backward; records the batch if it is due."""
        scale = 1.0 if self.accelerator.scaler is None else self.accelerator.scaler.get_scale()
        # With `model_init`, each call of `train` makes another model.
        with self._batches.batch(self.accelerator.unwrap_model(model, keep_torch_compile=False), scale):
            return super().training_step(model, inputs, num_items_in_batch)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = Path(output_dir if output_dir is not None else str(self.args.output_dir))
            if self.accelerator.native_amp:
                write_policy(folder, self.accelerator.policy)
            if self._batches.record.steps:
                write_record(folder, self._batches.record)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.accelerator.native_amp:
            compare_policy(resume_from_checkpoint, self.accelerator.policy)
        self._batches.record = read_record(resume_from_checkpoint) or Record()
