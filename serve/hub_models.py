"""A model of the Hugging Face Hub as a place to serve: its Triton repository, an export of its weights, or its ONNX file."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from halfserve.configuration import variable
from halfserve.files.model_hub import SCHEME, HubError, HubModel, find_model, folder_for_results, model_name
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.fleet.agent.worker_process import in_words, program
from halfserve.serve.storage.file_cache import exclusively
from halfserve.serve.storage.storage_options import ObjectStorage

logger = logging.getLogger(__name__)

COMMIT = re.compile(r"[0-9a-f]{40}")
# A file that only a model repository has, or the folder of one model.
REPOSITORY_FILE = re.compile(r"(?:[^/]+/)?(?:\d+/model\.\w+|config\.pbtxt)")
WEIGHTS = re.compile(r"[^/]+\.safetensors|pytorch_model[^/]*\.bin")
ONNX_FILES = ("model.onnx", "onnx/model.onnx")
EXPORT = "halfserve export"
END_S = 10.0  # time for the export to remove its temporary files after an interrupt


def place_of(storage: ObjectStorage) -> tuple[Path | ObjectStorage, str]:
    """Return the place to serve for a URL, and the URL that stands for this place at any time.

    `hf://ORG/NAME[@REVISION]` is a repository in Triton's layout, which is served as object storage is; or weights of PyTorch,
    which `halfserve export` converts in a process of its own, once for a commit; or one ONNX file. Other URLs stay as they are.

    Raises:
        ModelLoadError: the URL names no model, the hub has no such model, or it cannot be exported.
    """
    named = model_name(storage.url) if storage.url.startswith(SCHEME) else None
    if named is None:
        if storage.url.startswith(SCHEME) and "/" not in storage.url.removeprefix(SCHEME).strip("/"):
            raise ModelLoadError(f"{storage.url}: names no model of the hub; expected {SCHEME}ORG/NAME[@REVISION]")
        return storage, storage.url
    try:
        return _place(storage, *named)
    except HubError as error:
        raise ModelLoadError(str(error)) from None


def _place(storage: ObjectStorage, name: str, revision: str) -> tuple[Path | ObjectStorage, str]:
    if COMMIT.fullmatch(revision) and _is_exported(folder := folder_for_results(name, _key(revision))):
        return _told(folder, revision, storage.url), storage.url
    model = find_model(name, revision)
    if model.note:
        logger.warning("%s: %s", storage.url, model.note)
    if any(REPOSITORY_FILE.fullmatch(path) for path in model.files):
        return storage, storage.url
    onnx = _onnx_url(model)
    if any(WEIGHTS.fullmatch(path) for path in model.files) or _is_exported(folder_for_results(name, _key(model.commit))):
        return _exported(model, storage.url, onnx), f"{SCHEME}{model.pinned}"
    if not onnx:
        raise ModelLoadError(
            f"{storage.url}: no model that can be served; expected <model>/<version>/model.onnx, weights of PyTorch, or one "
            f"ONNX file, which its own URL names if there are several; it has {model.listed(sorted(model.files))}"
        )
    logger.info("%s: serves %s as it is, without a proof", storage.url, onnx)
    return replace(storage, url=onnx), onnx


def _onnx_url(model: HubModel) -> str:
    """Return the URL of its usual or only ONNX file; "" if there is none, or several."""
    every = [path for path in model.files if path.endswith(".onnx")]
    usual = [path for path in ONNX_FILES if path in every] or (every if len(every) == 1 else [])
    return f"{SCHEME}{model.pinned}/{usual[0]}" if usual else ""


def _key(commit: str) -> str:
    """Return the name of the folder for an export of a commit; options of the export from the environment change it."""
    prefix = variable(["export"], "")
    options = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(prefix))
    return f"{commit}-{hashlib.sha256(repr(options).encode()).hexdigest()[:8]}" if options else commit


def _is_exported(folder: Path) -> bool:
    return any(folder.glob("*/*/certificate.json"))  # a version appears whole or not at all


def _exported(model: HubModel, url: str, onnx: str) -> Path:
    """Return the repository with an export of the model, which is made where no process has made it before."""
    folder = folder_for_results(model.name, _key(model.commit))
    try:
        with exclusively(folder.with_name(f"{folder.name}.lock")):  # another server may export it now
            if not _is_exported(folder):
                logger.info("%s: exports %s to %s, once for this commit", url, model.pinned, folder)
                _run_export(model, folder, url, onnx)
    except OSError as error:
        raise ModelLoadError(
            f"{url}: {folder} cannot hold an export: {error.strerror}; set HF_HOME to another folder"
        ) from None
    return _told(folder, model.commit, url)


def _told(folder: Path, commit: str, url: str) -> Path:
    logger.info("%s: serves commit %s from %s", url, commit, folder)
    return folder


def _run_export(model: HubModel, folder: Path, url: str, onnx: str) -> None:
    command = [*program("halfserve"), *EXPORT.split()[1:], f"{SCHEME}{model.pinned}", "--repository", str(folder)]
    said = ""
    with (
        _terminating_by_exception(),
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # the verdict, which the certificate has
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        ) as child,
    ):
        assert child.stderr is not None  # noqa: S101  (a pipe)
        try:
            for line in child.stderr:
                if line.startswith(f"{EXPORT}: "):
                    said = line.removeprefix(f"{EXPORT}: ").rstrip()
                elif line.strip():
                    logger.info("%s: %s", EXPORT, line.rstrip())
        except BaseException:
            _end(child)
            raise
    if child.returncode == 0 and _is_exported(folder):
        return
    instead = f", or serve its ONNX model: halfserve serve {onnx}" if onnx else ""
    raise ModelLoadError(
        f"{url}: its weights cannot be exported: {said or in_words(child.returncode)}; export it with options of "
        f"yours: {EXPORT} {model.pinned} --repository FOLDER, then halfserve serve FOLDER{instead}"
    )


def _end(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGINT)
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()


@contextmanager
def _terminating_by_exception() -> Iterator[None]:
    """End this process by an exception on SIGTERM, so that it ends its child first."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # Python sets handlers in the main thread alone
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
