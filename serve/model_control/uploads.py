"""Models that load requests bring: checks of names, paths and contents, and the folders that keep the files."""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
import pickletools
import tempfile
from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path, PurePosixPath

from google.protobuf.message import DecodeError
from onnx import ModelProto

from halfserve.files.onnx_outline import read_outline
from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.backends.onnx_runtime.onnx_file import locations
from halfserve.serve.backends.runtimes import PYTHON_SUFFIX, ZIP
from halfserve.serve.engine.disk_files import temporary_folder
from halfserve.serve.engine.errors import FailedPreconditionError, InvalidArgumentError, ModelLoadError, UnavailableError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.repository.model_repository import ModelRepository
from halfserve.serve.model_control.loader_threads import LoaderThreads

logger = logging.getLogger(__name__)

MAX_NAME_BYTES = 255  # most bytes of a name in common file systems
MAX_DEPTH = 4
MAX_FILES = 1000
EXPECTED = "expected an ONNX model, a data file that one names, or text such as labels"
# A pickle has at least one of these; they are rare in content that only looks like one.
PICKLED = frozenset({"PROTO", "GLOBAL", "STACK_GLOBAL", "INST"})
PROTOCOL = b"\x80"  # a pickle's first byte since protocol 2; one in 20,000 data files looks like an older pickle
MAX_INSTRUCTIONS = 100_000  # parsed at most, which takes 0.1 s


class UploadedModels:
    """Keeps the uploaded files of each model as long as a serving version needs them. Lives on the event loop."""

    def __init__(self, core: InferenceCore, threads: LoaderThreads, *, allowed: bool) -> None:
        """Keep no files yet; `allowed`: load requests may bring files, which `thread` writes."""
        self._core = core
        self._threads = threads
        self._allowed = allowed
        self._folders: dict[str, list[tempfile.TemporaryDirectory[str]]] = {}

    async def store(self, name: str, config: str | None, files: Mapping[str, bytes]) -> ModelRepository:
        """Write the files of a load request, by path, into a repository with this one model.

        Raises:
            FailedPreconditionError: load requests may not bring files.
            InvalidArgumentError: there is no config, or a path or a content is not allowed.
            UnavailableError: the files cannot be written.
        """
        if not self._allowed:
            raise FailedPreconditionError(
                "model files in a load request are refused here; put them into the repository, or start the server with "
                "--model-uploads"
            )
        # Files are written to their end even if the client goes, so that the folder is known and can be deleted.
        writing = asyncio.ensure_future(self._threads.run(_written, name, config, files))
        try:
            folder = await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(_delete)
            raise
        except InvalidArgumentError as error:
            error.like(TritonPhrase.NOT_IN_REPOSITORY, model=name)
            raise
        self._folders.setdefault(name, []).append(folder)
        return ModelRepository(Path(folder.name))

    def has(self, name: str) -> bool:
        """Return whether a model is served from uploaded files."""
        return name in self._folders

    def drop_unused(self, name: str) -> None:
        """Delete uploaded files that no serving version needs: a copy of a model may be loaded again from its files.

        If only some versions of a load were refused, versions of it and of the previous load serve side by side.
        """
        paths = [model.path for model in self._core.served(name) if model.path is not None]
        kept = []
        for folder in self._folders.pop(name, []):
            if any(path.is_relative_to(folder.name) for path in paths):
                kept.append(folder)
            else:
                folder.cleanup()
        if kept:
            self._folders[name] = kept

    def close(self) -> None:
        """Delete all files."""
        for folders in self._folders.values():
            for folder in folders:
                folder.cleanup()


def _delete(written: asyncio.Future[tempfile.TemporaryDirectory[str]]) -> None:
    """Delete the files of a client that has gone."""
    if not written.cancelled() and written.exception() is None:
        written.result().cleanup()


def _written(name: str, config: str | None, files: Mapping[str, bytes]) -> tempfile.TemporaryDirectory[str]:
    """Write the files of a request to a temporary repository with one model."""
    if config is None:
        raise InvalidArgumentError("the load request brings files and no config, expected both; '{}' is a config")
    try:
        folder = temporary_folder("halfserve-model-")
        try:
            model = Path(folder.name) / name
            model.mkdir()
            write_upload(model, files)
        except BaseException:
            folder.cleanup()
            raise
    except OSError as error:
        logger.warning("%s: the files of a load request cannot be stored: %s", name, error, extra={"model": name})
        reason = os.strerror(error.errno or errno.EIO)  # the error's own text may list folders of the server
        raise UnavailableError(f"the files of the load request cannot be stored: {reason}") from None
    return folder


def check_name(name: str) -> None:
    """Check that a model's name is a plain folder name.

    Raises:
        InvalidArgumentError: the name is not valid.
    """
    if not _is_plain(name):
        raise InvalidArgumentError(
            f"model name {name[:100]!r} is not valid, expected the name of a folder in the repository: no '/', no '.' first"
        )


def check_paths(paths: Collection[str]) -> None:
    """Check that paths such as "1/model.onnx" stay in one folder, each a file of its own.

    Raises:
        InvalidArgumentError: a path leads elsewhere, is hidden, or is both a file and a folder; or there are too many.
    """
    if len(paths) > MAX_FILES:
        raise InvalidArgumentError(f"the load request brings {len(paths)} files, expected at most {MAX_FILES}")
    for path in paths:
        parts = path.split("/")
        if len(parts) > MAX_DEPTH or not all(_is_plain(part) for part in parts):
            raise InvalidArgumentError(
                f"file path {path[:200]!r} is not valid, expected one in the model's folder such as '1/model.onnx'"
            )
        if any(str(parent) in paths for parent in PurePosixPath(path).parents):
            raise InvalidArgumentError(f"file path {path[:200]!r} lies below what is a file itself")


def _is_plain(part: str) -> bool:
    """Return whether the text is a single visible path component on any system."""
    good = bool(part) and not part.startswith(".") and part.isprintable() and not set(part) & set('/\\:*?"<>|')
    return good and len(part.encode()) <= MAX_NAME_BYTES


def write_upload(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a load request, by path, into an empty folder; all are checked before the first is written.

    Raises:
        InvalidArgumentError: a path leads elsewhere, is hidden, or is both a file and a folder; or a content is not allowed.
        OSError: a file cannot be written.
    """
    check_paths(files.keys())
    models = {path: model for path, content in files.items() if (model := _model(content)) is not None}
    data = frozenset[str]().union(*(_data_files(model, path) for path, model in models.items()))
    for path, content in files.items():
        if path not in models:
            _require_kind(path, content, is_data=path in data)
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _model(content: bytes) -> ModelProto | None:
    """Return the graph of an ONNX model; None for other content."""
    try:
        model = read_outline(io.BytesIO(content), len(content), ModelProto).model
    except (DecodeError, ValueError):
        return None
    return model if model.HasField("graph") and model.opset_import else None


def _data_files(model: ModelProto, path: str) -> frozenset[str]:
    try:
        found = locations(model, Path(path))
    except ModelLoadError as error:
        raise InvalidArgumentError(str(error)) from None
    return frozenset(str(PurePosixPath(path).parent / location) for location in found)


def _require_kind(path: str, content: bytes, *, is_data: bool) -> None:
    """Check a file that is not an ONNX model. Pickles are refused under any name, because loading one can run code."""
    if path.endswith(PYTHON_SUFFIX):
        what = "Python code"
    elif content.startswith(ZIP):
        what = "a zip archive, as torch writes them, which can run code when it is loaded"
    elif (not is_data or content[:1] == PROTOCOL) and _is_pickle(content):
        what = "a pickle, which can run code when it is loaded"
    elif is_data or _is_text(content):
        return
    else:
        what = "no ONNX model"
    raise InvalidArgumentError(f"file {path[:200]!r} is {what}; {EXPECTED}; put other files into the repository itself")


def _is_text(content: bytes) -> bool:
    try:
        return b"\0" not in content and bool(content.decode() or True)
    except UnicodeDecodeError:
        return False


def _is_pickle(content: bytes) -> bool:
    """Return whether the content begins with pickle instructions up to a STOP, which are not executed."""
    names = set[str]()
    try:
        for instruction, _, _ in islice(pickletools.genops(content), MAX_INSTRUCTIONS):
            names.add(instruction.name)
    except Exception:  # noqa: BLE001  (any error: it is not a pickle)
        return False
    return not names.isdisjoint(PICKLED)
