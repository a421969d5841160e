"""The folder of a run: its lock, log, curves, checkpoints and record."""

from __future__ import annotations

import importlib
import json
import math
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from halfserve.amp_core.checkpoint import save_checkpoint
from halfserve.amp_core.recorder import Record, plot
from halfserve.amp_core.training.run import Evaluation, TrainingRun
from halfserve.amp_core.training.step import StepRecord
from halfserve.amp_core.training.training_settings import TrainingError
from halfserve.amp_core.weights.state_dicts import save_weights
from halfserve.files.atomic_files import atomic_file

CHECKPOINT, WEIGHTS, LOG, RECORD, RECORD_PLOT, TENSORBOARD = (
    "checkpoint.pt", "model.safetensors", "train.jsonl", "record.json", "record.png", "tensorboard"
)  # fmt: skip
PREVIOUS = {CHECKPOINT: "checkpoint.previous.pt", WEIGHTS: "model.previous.safetensors"}
_LOCK = ".lock"


@contextmanager
def writing_into(path: Path) -> Iterator[None]:
    """Name the folder in the error of a failed write.

    Raises:
        TrainingError: If the block raises an OSError: a full disk, a quota.
    """
    try:
        yield
    except OSError as error:
        raise TrainingError(f"cannot write into the folder {path}: {error.strerror or error}") from error


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Create the folder if it is missing, and lock it against other runs.

    The system releases the lock of a killed run; its unfinished files are removed here. Folders that were created here are
    removed again if the block raises before it has written anything.

    Raises:
        TrainingError: If the folder cannot be created or written to, or another run holds the lock.
    """
    with writing_into(path):
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / _LOCK).open("a+b", buffering=0)  # unbuffered, so that closing cannot fail on unwritten data
    with lock:
        with writing_into(path):
            _lock(lock, path)
            for name in (CHECKPOINT, WEIGHTS, LOG, RECORD, RECORD_PLOT):
                for unfinished in path.glob(f".{name}.*.tmp"):
                    unfinished.unlink(missing_ok=True)
        try:
            yield
        except BaseException:
            _remove_empty(made)
            raise


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, the innermost first, if they contain nothing but the lock."""
    with suppress(OSError):  # another file was created, or the system keeps them: the error that ended the run matters more
        if folders and [entry.name for entry in folders[0].iterdir()] == [_LOCK]:
            (folders[0] / _LOCK).unlink()
            for folder in folders:
                folder.rmdir()


def _lock(file: IO[bytes], folder: Path) -> None:
    try:
        import fcntl  # noqa: PLC0415  (Windows has none; two runs in one folder are not kept apart there)
    except ImportError:
        return
    try:
        # A lock of the process, not of the open file: data workers that briefly outlive a killed run do not hold it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        owner = file.read().decode(errors="replace").strip() or "unknown"
        raise TrainingError(f"another run (process {owner}) is writing into {folder}; choose another folder") from error
    except OSError:  # a file system without locks
        return
    file.truncate(0)
    file.write(str(os.getpid()).encode())


def keep_previous(folder: Path) -> None:
    """Rename checkpoint and weights of an earlier run: this run might end before it has its own."""
    for name, kept in PREVIOUS.items():
        if (folder / name).exists():
            (folder / name).replace(folder / kept)


class TrainLog:
    """`train.jsonl`: one JSON object per step and per evaluation, line-buffered."""

    def __init__(self, path: Path, *, keep_steps: int, keep_epochs: int) -> None:
        """Start the file, or continue one: lines after `keep_steps` and `keep_epochs`, and a torn last line, are dropped."""
        kept = _kept_lines(path, keep_steps, keep_epochs)
        with atomic_file(path) as file:
            file.writelines(kept)
        self._file: IO[str] = path.open("a", encoding="utf-8", buffering=1)

    def close(self) -> None:
        self._file.close()

    def write_step(self, record: StepRecord) -> None:
        self._write(asdict(record))

    def write_epoch(self, epoch: int, metrics: dict[str, float]) -> None:
        self._write({"epoch": epoch, "evaluation_loss": metrics["loss"], "accuracy": metrics.get("accuracy")})

    def sync(self) -> None:
        """Flush to the disk, because a checkpoint relies on the lines before it."""
        os.fsync(self._file.fileno())

    def _write(self, record: dict[str, Any]) -> None:
        # JSON has no infinity and no NaN.
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
        }
        self._file.write(json.dumps(finite) + "\n")


def _kept_lines(path: Path, steps: int, epochs: int) -> list[bytes]:
    if steps == 0 or not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [line for line in lines if line.endswith(b"\n") and _is_before(line, steps, epochs)]


def _is_before(line: bytes, steps: int, epochs: int) -> bool:
    """Return whether a line belongs to the first steps or epochs; torn and foreign lines do not."""
    try:
        record = json.loads(line)
        return bool(record["step"] <= steps if "step" in record else record.get("epoch", 0) <= epochs)
    except (ValueError, TypeError, AttributeError):
        return False


class Curves:
    """Scalars for TensorBoard over the optimizer steps; non-finite values are left out.

    Per step `loss/training`, `scale`, `skipped_steps` (so far), `gradient_norm` and `learning_rate`; per evaluation
    `loss/held_out`, and `accuracy/held_out` for a classifier. Curves of a resumed run after `steps_done` are purged.

    Raises:
        TrainingError: If the package is missing.
    """

    def __init__(self, folder: Path, *, steps_done: int, skipped_steps: int) -> None:
        self._skipped_steps = skipped_steps
        with ExitStack() as opened:
            opened.enter_context(_without_its_stack())
            # A step's values carry its number, so the first number to purge is the next one.
            self._writer: Any = _writer_class()(log_dir=str(folder), purge_step=steps_done + 1 if steps_done else None)
            self._quiet = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with self._quiet:
            self._writer.close()

    def write_step(self, record: StepRecord) -> None:
        self._skipped_steps += record.skipped
        values = {
            "loss/training": record.loss,
            "scale": record.scale,
            "skipped_steps": self._skipped_steps,
            "gradient_norm": record.gradient_norm,
            "learning_rate": record.learning_rate,
        }
        self._write(values, record.step)

    def write_evaluation(self, metrics: dict[str, float], step: int) -> None:
        self._write({f"{name}/held_out": value for name, value in metrics.items()}, step)

    def sync(self) -> None:
        """Flush, so that a resumed run finds everything."""
        self._writer.flush()

    def _write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)


@contextmanager
def _without_its_stack() -> Iterator[None]:
    """Keep Python from printing the exception of the writer's thread: it is raised again here, in one line."""
    usual = threading.excepthook

    def end(arguments: threading.ExceptHookArgs) -> None:
        if not type(arguments.thread).__module__.startswith("tensorboard."):
            usual(arguments)

    threading.excepthook = end
    try:
        yield
    finally:
        threading.excepthook = usual


def require_tensorboard() -> None:
    """Raise TrainingError, before anything is changed, if curves cannot be written because the package is missing."""
    _writer_class()


def _writer_class() -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError as error:
        raise TrainingError("the curves need the package tensorboard; run: pip install tensorboard") from error


def write_record(values: dict[str, Any], folder: Path) -> None:
    """Write a record as `record.json` and, where matplotlib is installed, as the picture `record.png`."""
    with atomic_file(folder / RECORD) as file:
        file.write(json.dumps(values).encode())
    try:
        plot(Record.from_dict(values), folder / RECORD_PLOT)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise


class RunOutputs:
    """The log, the curves, the checkpoints and the record; rank 0 writes them, the other processes take part.

    Log and curves are flushed before each checkpoint, so a checkpoint never has more steps than they.
    """

    def __init__(self, run: TrainingRun, *, is_new: bool, steps_done: int, epochs_done: int, skipped_steps: int) -> None:
        self._run, self._folder = run, run.settings.out
        self._log: TrainLog | None = None
        self._curves: Curves | None = None
        self._open_files = ExitStack()
        if run.world.is_first:
            with writing_into(self._folder), ExitStack() as opened:
                if is_new:
                    keep_previous(self._folder)
                log = TrainLog(self._folder / LOG, keep_steps=steps_done, keep_epochs=epochs_done)
                self._log = opened.enter_context(closing(log))
                if run.settings.tensorboard:
                    written = Curves(self._folder / TENSORBOARD, steps_done=steps_done, skipped_steps=skipped_steps)
                    self._curves = opened.enter_context(written)
                self._open_files = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with writing_into(self._folder):
            self._open_files.close()

    def write_step(self, record: StepRecord) -> None:
        """Write a step, and a checkpoint if it is due.

        Raises:
            TrainingError: If the folder cannot be written to.
            CheckpointError: If the checkpoint cannot be written.
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
        """Write an evaluation, and a checkpoint; raises as `write_step` does."""
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
            if self._run.is_complete:  # first, because nothing is written again after a complete checkpoint
                save_weights(self._folder / WEIGHTS, checkpoint.weights)
            save_checkpoint(self._folder / CHECKPOINT, checkpoint)
            if checkpoint.record and self._run.is_complete:
                write_record(checkpoint.record, self._folder)


def rewrite_record(run: TrainingRun) -> None:
    """Write the record of a run that was complete before, if there is one."""
    if run.world.is_first and run.record:
        with writing_into(run.settings.out):
            write_record(run.record, run.settings.out)
