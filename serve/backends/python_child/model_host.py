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
from concurrent.futures import Future
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from halfserve.serve.backends.python_child import triton_python_backend_utils
from halfserve.serve.backends.python_child.server_access import server
from halfserve.serve.backends.python_child.triton_errors import TritonModelException, phrased
from halfserve.serve.backends.python_child.triton_model_config import ModelConfig
from halfserve.serve.backends.python_child.triton_requests import InferenceRequest
from halfserve.serve.backends.python_child.triton_responses import (
    COMPLETE_FINAL,
    InferenceResponse,
    ResponseSender,
    error_of,
)

# Triton's second module is written in C. Models import it for the classes, which its first one has too.
UTILS = ("triton_python_backend_utils", "c_python_backend_utils")
CLASS = "TritonPythonModel"


class ModelFailedError(Exception):
    """A model.py raised an exception, or returned what it must not.

    Attributes:
        traceback: stack trace for the log; empty if the message says all.
        sent: the places in the batch of requests whose response was sent before, by a response sender.
    """

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.traceback = trace
        self.sent: list[int] = []


def failed(during: str, error: BaseException) -> ModelFailedError:
    """Return the failure of a step such as "initialize", with its traceback from model.py on."""
    text = error_of(error).message()
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return ModelFailedError(text if isinstance(error, TritonModelException) else f"{during}: {text}", trace)


def import_model(path: Path) -> ModuleType:
    """Import a model.py as a module of its own; its folder and the model's folder are importable, as in Triton.

    Raises:
        ModelFailedError: it cannot be imported, or has no class TritonPythonModel.
    """
    for name in UTILS:
        sys.modules.setdefault(name, triton_python_backend_utils)
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


def _send_failure(senders: list[ResponseSender], failure: ModelFailedError) -> None:
    """End the open requests of a decoupled model with an error."""
    response = InferenceResponse(error=error_of(TritonModelException(str(failure))))
    for sender in senders:
        if not sender.is_closed:
            sender.send(response, COMPLETE_FINAL)


def _check_response(request: InferenceRequest, response: Any) -> None:
    """Check what `execute` of a model that is not decoupled has returned for one request."""
    sender = request.asked_sender
    if response is None and (request.is_rescheduled or sender is not None):
        return
    if request.is_rescheduled:
        text = f"execute returned a {type(response).__name__} for a request that it reschedules, expected None"
        raise ModelFailedError(phrased("RESCHEDULED", text))
    if not isinstance(response, InferenceResponse):
        raise ModelFailedError(
            f"execute returned a {type(response).__name__} among its responses, expected pb_utils.InferenceResponse, or None "
            "for a request that its response sender answers"
        )
    if sender is not None:
        sender.require_none_sent()


def _ended_by_failure(requests: list[InferenceRequest]) -> list[int]:
    """Close the response senders of a failed batch; returns the places of requests that were answered before it failed."""
    sent = []
    for place, request in enumerate(requests):
        if request.asked_sender is not None:
            if request.asked_sender.is_answered:
                sent.append(place)
            request.asked_sender.is_closed = True
    return sent


class ModelHost:
    """A model.py and its object.

    Attributes:
        is_decoupled: it gives any number of responses to a request.
    """

    def __init__(self, path: Path) -> None:
        """Import the file.

        Raises:
            ModelFailedError: see `import_model`.
        """
        self._class: Any = getattr(import_model(path), CLASS)
        self._model: Any = None
        self.is_decoupled = False
        self._instance_name = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    def completed(self, config: str) -> str | None:
        """Return the configuration, completed by the model's auto_complete_config; None without one. Both are JSON.

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
        self._instance_name = arguments.get("model_instance_name", "")
        self.is_decoupled = is_decoupled
        try:
            self._model = self._class()
            if hasattr(self._model, "initialize"):
                self._model.initialize(dict(arguments))
        except Exception as error:
            raise failed("initialize", error) from error
        if not callable(getattr(self._model, "execute", None)):
            raise ModelFailedError(f"{CLASS} has no method execute")

    def execute(self, requests: list[InferenceRequest]) -> list[InferenceResponse | None]:
        """Return the responses, one per request; None for a request whose responses its sender gives, or that is rescheduled.

        Raises:
            ModelFailedError: it fails, or returns something else.
        """
        # Of a decoupled model's requests only the senders can tell whether they have ended.
        senders = [request.get_response_sender() for request in requests] if self.is_decoupled else []
        try:
            result = self._model.execute(requests)
            if inspect.iscoroutine(result):
                result = self._run(result, senders)
            responses = self._checked(result, requests)
        except BaseException as error:  # a client must not end the model's process, which takes seconds to start
            failure = error if isinstance(error, ModelFailedError) else failed("execute", error)
            if self.is_decoupled:
                _send_failure(senders, failure)
            else:
                failure.sent = _ended_by_failure(requests)
            raise failure from error
        for request, response in zip(requests, responses, strict=True):
            sender = request.asked_sender
            if sender is None:
                continue
            if response is None and not request.is_rescheduled:
                sender.owes = True
            else:
                sender.is_closed = True
        return responses

    @property
    def checks_readiness(self) -> bool:
        """Whether the model has a method `is_ready`."""
        return callable(getattr(self._model, "is_ready", None))

    def readiness(self) -> tuple[bool, str]:
        """Return what the model's is_ready says, and the error if it fails. On a thread of its own."""
        try:
            result = self._model.is_ready()
            if inspect.iscoroutine(result):
                result = self._begun(result).result()
        except BaseException as error:  # noqa: BLE001  (a model that cannot say is not ready)
            return False, error_of(error).message()
        if not isinstance(result, bool):
            return False, f"it returned {type(result).__name__}, expected bool"
        return result, ""

    def _checked(self, result: Any, requests: list[InferenceRequest]) -> list[InferenceResponse | None]:
        if self.is_decoupled:
            if result is not None:
                text = f"execute returned {type(result).__name__}, expected None from a decoupled model"
                raise ModelFailedError(phrased("NOT_NONE", text, model=self._instance_name))
            return [None] * len(requests)
        if result is None and any(request.asked_sender is not None for request in requests):
            result = [None] * len(requests)
        if not isinstance(result, list | tuple):
            raise ModelFailedError(f"execute returned {type(result).__name__}, expected a list with one response per request")
        if len(result) != len(requests):
            raise ModelFailedError(f"execute returned {len(result)} responses, expected {len(requests)}, one per request")
        for request, response in zip(requests, result, strict=True):
            _check_response(request, response)
        return list(result)

    def _run(self, coroutine: Any, senders: list[ResponseSender]) -> Any:
        """Wait for a coroutine of the model.

        That of a decoupled model is not waited for: its failure ends the requests of `senders` that are open then.
        """
        future = self._begun(coroutine)
        if not self.is_decoupled:
            return future.result()
        access = server()

        def done(ended: Future[Any]) -> None:
            error = None if ended.cancelled() else ended.exception()
            if error is not None:
                failure = failed("execute", error)
                _send_failure(senders, failure)
                access.tell("failed", {"text": str(failure), "trace": failure.traceback}, [])

        future.add_done_callback(done)
        return None

    def _begun(self, coroutine: Any) -> Future[Any]:
        """Begin a coroutine of the model, whose loop goes on between two batches on a thread of its own."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="model-coroutines", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

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
