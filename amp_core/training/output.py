"""What a run writes into its folder while it goes on."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from amp_core.checkpoint import save_checkpoint
from amp_core.training.folder import CHECKPOINT, LOG, TENSORBOARD, set_previous_aside, writing_into
from amp_core.training.log import TrainLog
from amp_core.training.recording import write_record
from amp_core.training.tensorboard import Curves, curves

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from amp_core.training.log import StepRecord
    from amp_core.training.run import Evaluation, TrainingRun


class Output:
    """The log, the curves, the checkpoints and the record; of several processes rank 0 writes, and the others take part.

    A checkpoint never speaks of steps that are not in the log and the curves: those are on their way to the disk before it.

    Args:
        run: Whose state goes into the checkpoints.
        is_new: Whether the run starts, in a folder that an earlier one may have used.
        steps_done: Of an earlier part of the run; what the log has beyond is dropped.
        epochs_done: Likewise.
        skipped_steps: Of the steps done.
    """

    def __init__(self, run: TrainingRun, *, is_new: bool, steps_done: int, epochs_done: int, skipped_steps: int) -> None:
        self._run, self._folder = run, run.settings.out
        self._log: TrainLog | None = None
        self._curves: Curves | None = None
        self._open_files = ExitStack()
        if run.world.is_first:
            with writing_into(self._folder), ExitStack() as opened:
                if is_new:
                    set_previous_aside(self._folder)
                log = TrainLog(self._folder / LOG, keep_steps=steps_done, keep_epochs=epochs_done)
                self._log = opened.enter_context(log)
                wanted = run.settings.tensorboard
                self._curves = opened.enter_context(
                    curves(self._folder / TENSORBOARD, wanted=wanted, steps_done=steps_done, skipped_steps=skipped_steps)
                )
                self._open_files = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with writing_into(self._folder):
            self._open_files.close()

    def write_step(self, record: StepRecord) -> None:
        """Write a step, and a checkpoint if it is time for one.

        Raises:
            TrainingError: If the folder cannot be written to.
            CheckpointError: Likewise.
        """
        with writing_into(self._folder):
            if self._log:
                self._log.write_step(record)
            if self._curves:
                self._curves.write_step(record)
        every = self._run.settings.checkpoint_every
        if every and record.step % every == 0:
            self._save()

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """Write an evaluation, and a checkpoint.

        Raises:
            TrainingError: If the folder cannot be written to.
            CheckpointError: Likewise.
        """
        with writing_into(self._folder):
            if self._log:
                self._log.write_epoch(evaluation.epoch, evaluation.metrics)
            if self._curves:
                self._curves.write_evaluation(evaluation.metrics, evaluation.step)
        self._save()

    def _save(self) -> None:
        checkpoint = self._run.checkpoint()
        if self._log is None:
            return
        with writing_into(self._folder):
            self._log.sync()
            if self._curves:
                self._curves.sync()
            save_checkpoint(self._folder / CHECKPOINT, checkpoint)
            if checkpoint.record and self._run.is_complete:
                write_record(checkpoint.record, self._folder)


def rewrite_record(run: TrainingRun) -> None:
    """Write the record of a run that was complete before; nothing where there is none.

    Raises:
        TrainingError: If the folder cannot be written to.
    """
    if run.world.is_first and run.record:
        with writing_into(run.settings.out):
            write_record(run.record, run.settings.out)
