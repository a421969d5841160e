"""A model of the Hugging Face Hub as a place to serve: its Triton repository, an export of its weights, or its ONNX file."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import signal
import subprocess
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

# A file that only a model repository has, or the folder of one model.
REPOSITORY_FILE = re.compile(r"(?:[^/]+/)?(?:\d+/model\.\w+|config\.pbtxt)")
WEIGHTS = re.compile(r"[^/]+\.safetensors|pytorch_model[^/]*\.bin")
ONNX_FILES = ("model.onnx", "onnx/model.onnx")
EXPORT = "halfserve export"
END_S = 10.0  # time for the export to end after an interrupt


def place_of(storage: ObjectStorage) -> Path | ObjectStorage:
    """Return the place to serve for a URL.

    `hf://ORG/NAME[@REVISION]` is a repository in Triton's layout, which is served as object storage is; or weights of PyTorch,
    which `halfserve export` converts in a process of its own, once for a commit; or one ONNX file. Other URLs stay as they are.

    Raises:
        ModelLoadError: the URL names no model, the hub has no such model, or it cannot be exported.
    """
    named = model_name(storage.url) if storage.url.startswith(SCHEME) else None
    if named is None:
        if storage.url.startswith(SCHEME) and "/" not in storage.url.removeprefix(SCHEME).strip("/"):
            raise ModelLoadError(f"{storage.url}: names no model of the hub; expected {SCHEME}ORG/NAME[@REVISION]")
        return storage
    try:
        return _place(storage, find_model(*named))
    except HubError as error:
        raise ModelLoadError(str(error)) from None


def _place(storage: ObjectStorage, model: HubModel) -> Path | ObjectStorage:
    if model.note:
        logger.warning("%s: %s", storage.url, model.note)
    if any(REPOSITORY_FILE.fullmatch(path) for path in model.files):
        return storage
    onnx, folder = _onnx_url(model), folder_for_results(model.name, _key(model.commit))
    if any(WEIGHTS.fullmatch(path) for path in model.files) or _is_exported(folder):
        _export(model, folder, storage.url, onnx)
        logger.info("%s: serves commit %s from %s", storage.url, model.commit, folder)
        return folder
    if not onnx:
        raise ModelLoadError(
            f"{storage.url}: no model that can be served; expected <model>/<version>/model.onnx, weights of PyTorch, or one "
            f"ONNX file, which its own URL names if there are several; it has {model.listed(sorted(model.files))}"
        )
    logger.info("%s: serves %s as it is, without a proof", storage.url, onnx)
    return replace(storage, url=onnx)


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


def _export(model: HubModel, folder: Path, url: str, onnx: str) -> None:
    """Export the model to the folder, where no process has done it before."""
    try:
        with exclusively(folder.with_name(f"{folder.name}.lock")):  # another server may export it now
            if _is_exported(folder):
                return
            logger.info("%s: exports %s to %s, once for this commit", url, model.pinned, folder)
            error_line = _run_export(model, folder)
    except OSError as error:
        raise ModelLoadError(
            f"{url}: {folder} cannot hold an export: {error.strerror}; set HF_HOME to another folder"
        ) from None
    if error_line:
        instead = f", or serve its ONNX model: halfserve serve {onnx}" if onnx else ""
        raise ModelLoadError(
            f"{url}: its weights cannot be exported: {error_line}; export it with options of yours: {EXPORT} {model.pinned} "
            f"--repository FOLDER, then halfserve serve FOLDER{instead}"
        )


def _run_export(model: HubModel, folder: Path) -> str:
    """Run the command; return its error line, or how it ended; "" after success."""
    command = [*program("halfserve"), *EXPORT.split()[1:], f"{SCHEME}{model.pinned}", "--repository", str(folder)]
    said, before = "", signal.signal(signal.SIGTERM, _leave)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # the verdict, which the certificate has
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ) as child:
        try:
            for line in child.stderr or ():
                if line.startswith(f"{EXPORT}: "):
                    said = line.removeprefix(f"{EXPORT}: ").rstrip()
                elif line.strip():
                    logger.info("%s: %s", EXPORT, line.rstrip())
        except BaseException:
            child.send_signal(signal.SIGINT)  # so that it removes its temporary files
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    return (said or in_words(child.returncode)) if child.returncode else ""


def _leave(number: int, _frame: FrameType | None) -> None:
    """End this process by an exception, which ends its child first."""
    raise SystemExit(128 + number)
