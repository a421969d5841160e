"""A child process that runs ONNX models, so that a crash, a hang or a refusal is recorded and ends nothing else."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
import onnxruntime

from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import ModelFile
from halfserve.export.verification.samples import Array, Value
from halfserve.files.cuda_products import CUDA_ENVIRONMENT

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
WORKER = Path(__file__).with_name("worker.py")
SILENCE_SECONDS = 600.0

StagedFeed: TypeAlias = dict[str, str]
LEVELS = ("ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_BASIC", "ORT_DISABLE_ALL")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of running a model in the child process.

    Attributes:
        batches: For each batch that was reached, its outputs in the model's order, or the text of its error.
        refusal: Why the runtime refused to open the model.
        crash: The end of the process, such as "killed by SIGSEGV"; earlier batches are present.
        providers: The session's actual execution providers.
        seconds: The total running time of the batches in seconds, without opening the model.
    """

    batches: tuple[list[Value] | str, ...] = ()
    refusal: str | None = None
    crash: str | None = None
    providers: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def trouble(self) -> str | None:
        """The crash or the refusal."""
        return self.crash or self.refusal


class Sandbox:
    """One child process at a time, and the folder of files shared with it; both are removed on exit.

    The process runs model after model, since starting it costs more than most models do. A model that crashes a reused process
    runs again in a fresh one, in case an earlier model damaged it.
    """

    def __init__(self, *, worker: Path = WORKER, silence_seconds: float = SILENCE_SECONDS) -> None:
        self._command = [sys.executable, "-P", str(worker)]
        self._silence_seconds = silence_seconds
        self._process: _Process | None = None
        self._folder = Path()
        self._count = 0

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="halfserve-verify-"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def new_folder(self) -> Path:
        """Create an empty folder that lives as long as the sandbox."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        return folder

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Remove the folders that are created within this context when it ends."""
        first = self._count + 1
        try:
            yield
        finally:
            for number in range(first, self._count + 1):
                shutil.rmtree(self._folder / str(number), ignore_errors=True)

    def stage(self, feeds: Sequence[Mapping[str, Array]]) -> list[StagedFeed]:
        """Write batches to files, once for all models that run on them.

        Raises:
            ExportError: The files cannot be written.
        """
        folder = self.new_folder()
        staged: list[StagedFeed] = []
        try:
            for number, feed in enumerate(feeds):
                staged.append({name: str(folder / f"{number}-{index}.npy") for index, name in enumerate(feed)})
                for name, array in feed.items():
                    np.save(staged[-1][name], array, allow_pickle=False)
        except OSError as error:
            raise ExportError(f"cannot write the samples to {folder}: {error.strerror or error}") from error
        return staged

    def run(
        self,
        model: Path,
        batches: Sequence[StagedFeed],
        *,
        level: str,
        provider: str = CPU,
        options: Mapping[str, str] | None = None,
        weights: Sequence[Mapping[str, Any]] = (),
    ) -> RunResult:
        """Open a model and run batches that `stage` wrote, if any.

        `level` is a name in `onnxruntime.GraphOptimizationLevel`; `options` are the provider's; `weights` are initializers in
        other files than the model names (see `halfserve.export.verification.worker`).
        """
        folder = self.new_folder()
        request: dict[str, Any] = {"model": str(model.absolute()), "level": level, "provider": provider}
        request |= {"options": dict(options or {}), "batches": list(batches), "weights": list(weights)}
        line = json.dumps({**request, "folder": str(folder)})
        shared = self._process is not None
        answer = self._ask(line)
        if answer.crash is not None and shared:
            answer = self._ask(line)
        shutil.rmtree(folder, ignore_errors=True)
        return answer

    def _ask(self, line: str) -> RunResult:
        process = self._process or _Process([*self._command, str(self._folder)], self._folder / "errors.txt")
        self._process = process
        answer = process.ask(line, self._silence_seconds)
        if answer.crash is not None:
            self._end()
        return answer

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """One child; a thread reads its answers, so that waiting can time out."""

    def __init__(self, command: list[str], errors: Path) -> None:
        self._errors = errors
        with errors.open("wb") as stderr:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**CUDA_ENVIRONMENT, **os.environ},
            )
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, line: str, silence_seconds: float) -> RunResult:
        batches: list[list[Value] | str] = []
        providers: tuple[str, ...] = ()
        seconds = 0.0
        try:
            self._send(line)
            while True:
                answer = self._next(silence_seconds)
                if answer is None:
                    return RunResult(batches=tuple(batches), crash=self._end_in_words(), providers=providers)
                stage = answer["stage"]
                if stage == "refused":
                    return RunResult(refusal=answer["error"])
                if stage == "done":
                    return RunResult(batches=tuple(batches), providers=providers, seconds=seconds)
                if stage == "opened":
                    providers = tuple(answer["providers"])
                elif stage == "failed":
                    batches.append(answer["error"])
                else:
                    batches.append([_loaded(spec) for spec in answer["outputs"]])
                    seconds += answer["seconds"]
        except queue.Empty:
            text = f"no answer within {silence_seconds:g} s"
            return RunResult(batches=tuple(batches), crash=text, providers=providers)

    def end(self) -> None:
        self._child.kill()
        self._child.wait()
        self._reader.join()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # a request was unsent when the child died
                    pipe.close()

    def _send(self, line: str) -> None:
        if self._child.stdin is None:
            raise ValueError(line)
        try:
            self._child.stdin.write(line + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            return  # the child died: its answers end, and its exit status says why

    def _next(self, silence_seconds: float) -> dict[str, Any] | None:
        text = self._answers.get(timeout=silence_seconds)
        answer: dict[str, Any] | None = None if text is None else json.loads(text)
        return answer

    def _read(self) -> None:
        for line in self._child.stdout or ():
            if not line.endswith("\n"):
                break  # the child died while writing
            self._answers.put(line)
        self._answers.put(None)

    def _end_in_words(self) -> str:
        status = self._child.wait()
        if status < 0:
            name = signal.Signals(-status).name
            return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        return f"ended with exit status {status}" + (f": {lines[-1]}" if lines else "")


def _loaded(spec: dict[str, Any]) -> Value:
    if spec["kind"] == "tensor":
        loaded: Array = np.load(spec["file"], allow_pickle=False)
        return loaded
    if spec["kind"] == "sequence":
        return [np.load(item["file"], allow_pickle=False) for item in spec["items"]]
    return None


def on_disk(model: ModelFile, sandbox: Sandbox) -> Path:
    """Return the model's file, written to the sandbox where it has none.

    Raises:
        ExportError: The file cannot be written.
    """
    return model.path if model.path is not None else written_model(model.content, sandbox)


def open_reference(
    path: Path, sandbox: Sandbox, batches: Sequence[StagedFeed], levels: Sequence[str] = LEVELS
) -> tuple[list[Value] | str, ...]:
    """Return the reference's answers at the first level at which it opens.

    Raises:
        ExportError: The reference opens at no level.
    """
    return at_first_level(path, sandbox, batches, levels, what="the reference").batches


def at_first_level(
    path: Path,
    sandbox: Sandbox,
    batches: Sequence[StagedFeed],
    levels: Sequence[str] = LEVELS,
    *,
    what: str = "the converted model",
    weights: Sequence[Mapping[str, Any]] = (),
) -> RunResult:
    """Return a model's result at the first level at which it opens; `what` names the model in error texts, `weights` as in
    `run`.

    Raises:
        ExportError: The model opens at no level.
    """
    troubles = []
    for level in levels:
        answer = sandbox.run(path, batches, level=level, provider=CPU, weights=weights)
        if answer.trouble is None or answer.batches:
            return answer
        troubles.append(f"{level}: {answer.trouble}")
        if answer.refusal is not None:
            raise ExportError(f"ONNX Runtime cannot open {what}: {answer.refusal}")
    raise ExportError(f"ONNX Runtime {onnxruntime.__version__} crashes when it opens {what} ({'; '.join(troubles)})")


def written_model(content: bytes, sandbox: Sandbox) -> Path:
    path = sandbox.new_folder() / "model.onnx"
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ExportError(f"cannot write a copy of the model to {path.parent}: {error.strerror or error}") from error
    return path
