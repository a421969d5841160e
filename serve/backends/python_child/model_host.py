"""One loaded model.py: import, complete its configuration, initialize, execute, finalize."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from halfserve.serve.backends.python_child import triton_python_backend_utils
from halfserve.serve.backends.python_child.errors import TritonModelException
from halfserve.serve.backends.python_child.model_config import ModelConfig
from halfserve.serve.backends.python_child.requests import InferenceRequest, InferenceResponse, error_of

UTILS = "triton_python_backend_utils"
CLASS = "TritonPythonModel"


class ModelFailedError(Exception):
    """A model.py raised an exception, or returned what it must not.

    Attributes:
        traceback: for the log; empty where the message says all.
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.traceback = trace


def failed(during: str, error: BaseException) -> ModelFailedError:
    """The failure of a step such as "initialize", with its traceback from model.py on."""
    told = error_of(error).message()
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return ModelFailedError(told if isinstance(error, TritonModelException) else f"{during}: {told}", trace)


def import_model(path: Path) -> ModuleType:
    """Import a model.py as a module of its own; its folder and the model's folder are importable, as in Triton.

    Raises:
        ModelFailedError: it cannot be imported, or has no class TritonPythonModel.
    """
    sys.modules.setdefault(UTILS, triton_python_backend_utils)
    triton_python_backend_utils.set_model_dir(str(path.parent))
    for folder in (str(path.parent), str(path.parent.parent)):
        if folder not in sys.path:
            sys.path.append(folder)
    # A package of the version folder, so that model.py may import its neighbours relatively.
    package = f"_halfserve_model_{abs(hash(str(path.parent)))}"
    try:
        holder = ModuleType(package)
        holder.__path__ = [str(path.parent)]
        sys.modules[package] = holder
        name = f"{package}.{path.stem}"
        loader = SourceFileLoader(name, str(path))
        module = importlib.util.module_from_spec(ModuleSpec(name, loader, origin=str(path)))
        module.__file__ = str(path)
        sys.modules[name] = module
        loader.exec_module(module)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise failed("cannot be imported", error) from error
    if not inspect.isclass(getattr(module, CLASS, None)):
        raise ModelFailedError(f"has no class {CLASS}")
    return module


class ModelHost:
    """A model.py and its object."""

    def __init__(self, path: Path) -> None:
        """Import the file.

        Raises:
            ModelFailedError: see `import_model`.
        """
        self._class: Any = getattr(import_model(path), CLASS)
        self._model: Any = None
        self._is_decoupled = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def completed(self, config: str) -> str | None:
        """The configuration, completed by the model's auto_complete_config; None without one. Both are JSON.

        Raises:
            ModelFailedError: it fails, or returns something else.
        """
        complete: Callable[[ModelConfig], Any] | None = getattr(self._class, "auto_complete_config", None)
        if complete is None:
            return None
        given = ModelConfig(config)
        try:
            result = complete(given)
        except Exception as error:
            raise failed("auto_complete_config", error) from error
        if not isinstance(result, ModelConfig):
            raise ModelFailedError(f"auto_complete_config returned {type(result).__name__}, expected the ModelConfig")
        return json.dumps(result.as_dict())

    def initialize(self, arguments: Mapping[str, str], *, is_decoupled: bool) -> None:
        """Make the model's object.

        Raises:
            ModelFailedError: it fails.
        """
        self._is_decoupled = is_decoupled
        try:
            self._model = self._class()
            if hasattr(self._model, "initialize"):
                self._model.initialize(dict(arguments))
        except Exception as error:
            raise failed("initialize", error) from error
        if not callable(getattr(self._model, "execute", None)):
            raise ModelFailedError(f"{CLASS} has no method execute")

    def execute(self, requests: list[InferenceRequest]) -> list[InferenceResponse] | None:
        """The responses, one per request; None from a decoupled model, which sends them itself.

        Raises:
            ModelFailedError: it fails, or returns something else.
        """
        senders = [request.sends_responses() for request in requests] if self._is_decoupled else []
        try:
            result = self._model.execute(requests)
            if inspect.iscoroutine(result):
                result = self._run(result)
            return self._checked(result, len(requests))
        except (Exception, SystemExit) as error:
            failure = error if isinstance(error, ModelFailedError) else failed("execute", error)
            if not self._is_decoupled:
                raise failure from error
            told = InferenceResponse(error=error_of(TritonModelException(str(failure))))
            for sender in senders:
                if not sender.is_closed:
                    sender.send(told, 1)
            raise failure from error

    def _checked(self, result: Any, count: int) -> list[InferenceResponse] | None:
        if self._is_decoupled:
            if result is not None:
                raise ModelFailedError(f"execute returned {type(result).__name__}, expected None from a decoupled model")
            return None
        if not isinstance(result, list | tuple):
            raise ModelFailedError(f"execute returned {type(result).__name__}, expected a list with one response per request")
        if len(result) != count:
            raise ModelFailedError(f"execute returned {len(result)} responses, expected {count}, one per request")
        for response in result:
            if not isinstance(response, InferenceResponse):
                raise ModelFailedError(
                    f"execute returned a {type(response).__name__} among its responses, expected pb_utils.InferenceResponse"
                )
        return list(result)

    def _run(self, coroutine: Any) -> Any:
        """Wait for a coroutine of the model, whose loop goes on between two batches on a thread of its own."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="model-coroutines", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return None if self._is_decoupled else future.result()

    def finalize(self) -> None:
        """Have the model clean up.

        Raises:
            ModelFailedError: it fails.
        """
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        except Exception as error:
            raise failed("finalize", error) from error
