"""Services of the server for a running model.py: logs, metrics, requests to other models, loading models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from halfserve.protos.datatypes import BY_WIRE
from halfserve.serve.backends.python.custom_metrics import CustomMetrics
from halfserve.serve.backends.python.process_messages import END, SEQUENCE, START, TIMEOUT, code_of, from_wire, to_wire
from halfserve.serve.backends.python_child.wire import WireTensor
from halfserve.serve.engine.background_threads import Worker
from halfserve.serve.engine.errors import BackendError, FailedPreconditionError, InferenceError, ModelLoadError, NotFoundError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.model_calls import ModelCall, ModelCalls, RunningCall
from halfserve.serve.engine.requests import CallingExecution, Parameter, RemarkedAnswer
from halfserve.serve.engine.tensors import Tensors

logger = logging.getLogger(__name__)

LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)  # index: Triton's number of the level
Answer = Callable[[dict[str, Any], Sequence[WireTensor]], None]


class Services:
    """Services that all Python models of a server share.

    Attributes:
        metrics: metrics that the models declare.
        calls: reaches the other models; None until the server has a core.
    """

    def __init__(self) -> None:
        self.metrics = CustomMetrics()
        self.calls: ModelCalls | None = None

    def connected(self) -> ModelCalls:
        """The way to other models.

        Raises:
            FailedPreconditionError: there is none yet.
        """
        if self.calls is None:
            raise FailedPreconditionError("this server does not let models call models")
        return self.calls


class CopyServices:
    """Services of the server for one copy of a model. Events come on one thread; replies leave on others.

    Attributes:
        caller: the execution in progress, which makes the calls; None between two.
        answer: sends a reply to the copy, and may block. Set before the first event.
        is_loading: the copy is being loaded, so that a load that it asks for delays its own.
    """

    def __init__(self, services: Services, label: str) -> None:
        self._services = services
        self._label = label
        self.caller: CallingExecution | None = None
        self.answer: Answer = _discard
        self.is_loading = False
        self._replies: Worker | None = None
        self._running: dict[int, RunningCall] = {}
        # Each returns the reply; None where it comes later, or not at all.
        self._handlers: dict[str, Callable[[Mapping[str, Any], list[WireTensor]], dict[str, Any] | None]] = {
            "log": self._log,
            "failed": self._failed,
            "sync": lambda *_: {},  # its reply says that all events before have been handled
            "metric": self._metric,
            "metric_family": self._metric_family,
            "metric_new": self._metric_new,
            "metric_value": self._metric_value,
            "infer": self._infer,
            "abandon": self._abandon,
            "is_ready": self._is_ready,
            "load_model": self._load_model,
            "unload_model": self._unload_model,
        }

    def handle(self, header: Mapping[str, Any], tensors: list[WireTensor]) -> None:
        """Do what one event asks for."""
        try:
            reply = self._handlers[header["k"]](header, tensors)
        except InferenceError as error:
            reply = {"error": code_of(error)}
        except KeyError as error:
            reply = {"error": code_of(BackendError(f"{header['k']}: there is no {error}"))}
        if reply is not None and "call" in header and header["k"] != "abandon":
            self.reply({"call": header["call"], **reply}, [])

    def stop(self) -> None:
        """The copy has gone: cancel its requests."""
        for running in list(self._running.values()):
            running.cancel()
        self._running.clear()
        if self._replies is not None:
            self._replies.stop()

    def reply(self, header: dict[str, Any], tensors: Sequence[WireTensor]) -> None:
        """Send a reply, from a thread that may wait for the copy to read."""
        if self._replies is None:
            self._replies = Worker(f"replies to {self._label}")
        self._replies.submit(self.answer, header, tensors)

    def _log(self, header: Mapping[str, Any], _: list[WireTensor]) -> None:
        logger.log(LEVELS[header["level"]], "%s: %s", self._label, header["text"], extra={"model": self._label})

    def _failed(self, header: Mapping[str, Any], _: list[WireTensor]) -> None:
        log_failure(self._label, header["text"], header["trace"])

    def _metric(self, header: Mapping[str, Any], _: list[WireTensor]) -> None:
        self._services.metrics.change(header["name"], header["labels"], header["action"], header["value"])

    def _metric_family(self, header: Mapping[str, Any], _: list[WireTensor]) -> dict[str, Any]:
        self._services.metrics.declare(header["name"], header["text"], header["kind"])
        return {}

    def _metric_new(self, header: Mapping[str, Any], _: list[WireTensor]) -> dict[str, Any]:
        self._services.metrics.add(header["name"], header["labels"], header["buckets"])
        return {}

    def _metric_value(self, header: Mapping[str, Any], _: list[WireTensor]) -> dict[str, Any]:
        return {"value": self._services.metrics.value(header["name"], header["labels"])}

    def _abandon(self, header: Mapping[str, Any], _: list[WireTensor]) -> None:
        running = self._running.pop(header["call"], None)
        if running is not None:
            running.cancel()

    def _is_ready(self, header: Mapping[str, Any], _: list[WireTensor]) -> None:
        self._on_loop(header["call"], self._ready(header["model"], header["version"]))

    def _load_model(self, header: Mapping[str, Any], tensors: list[WireTensor]) -> None:
        caller = self._label.rpartition("/")[0] if self.is_loading else None
        files = {tensor.name: tensor.data.tobytes() for tensor in tensors}
        self._on_loop(header["call"], self._load(header["model"], header["config"], files, caller))

    def _unload_model(self, header: Mapping[str, Any], _: list[WireTensor]) -> None:
        self._on_loop(header["call"], self._unload(header["model"]))

    def _infer(self, header: Mapping[str, Any], tensors: list[WireTensor]) -> None:
        number = header["call"]
        call = ModelCall(
            model=header["model"],
            version="" if header["version"] < 0 else str(header["version"]),
            inputs={tensor.name: from_wire(tensor) for tensor in tensors},
            datatypes={tensor.name: tensor.datatype for tensor in tensors},
            outputs=header["outputs"],
            many=header["decoupled"],
            request_id=header["id"],
            parameters=_parameters(header),
            timeout_s=header["timeout"] / 1e6 or None,
            caller=self.caller,
        )
        self._running[number] = self._services.connected().start(call, _Replying(self, number, many=call.many))

    def ended(self, number: int) -> None:
        """A call has its answer."""
        self._running.pop(number, None)

    def _on_loop(self, number: int, work: Coroutine[Any, Any, dict[str, Any]]) -> None:
        """Reply with what a coroutine on the event loop returns."""

        async def run() -> None:
            try:
                reply = await work
            except (InferenceError, ModelLoadError) as error:
                reply = {"error": code_of(error)}
            except Exception as error:
                logger.exception("%s: the server cannot do what the model asks for", self._label, extra={"model": self._label})
                reply = {"error": code_of(BackendError(f"the server failed: {type(error).__name__}"))}
            self.reply({"call": number, **reply}, [])

        try:
            loop = self._services.connected().loop
        except InferenceError:
            work.close()
            raise
        asyncio.run_coroutine_threadsafe(run(), loop)

    async def _ready(self, model: str, version: str) -> dict[str, Any]:
        try:
            return {"ready": self._services.connected().core.is_model_ready(model, version)}
        except NotFoundError:
            return {"ready": False}

    async def _load(self, model: str, config: str, files: Mapping[str, bytes], caller: str | None) -> dict[str, Any]:
        await self._services.connected().core.load(model, config or None, files, caller=caller)
        return {}

    async def _unload(self, model: str) -> dict[str, Any]:
        core = self._services.connected().core
        try:
            core.versions(model)
        except NotFoundError:
            if core.knows(model):
                return {}  # it is unloaded already
            raise
        # In the background, as Triton does: the model may unload itself, which waits for this very request.
        core.wait_for(asyncio.get_running_loop().create_task(_unloaded(core.unload(model), model)))
        return {}


def log_failure(label: str, text: str, trace: str) -> None:
    """Log the failure of a model's execute, with the traceback of its process."""
    logger.error("%s: execute failed: %s", label, text, extra={"model": label, "trace": trace})


def _discard(_: dict[str, Any], __: Sequence[WireTensor]) -> None:
    """Before there is a copy."""


async def _unloaded(work: Coroutine[Any, Any, None], model: str) -> None:
    try:
        await work
    except InferenceError as error:
        logger.warning("model %r cannot be unloaded: %s", model, error)


class _Replying:
    """Sends the responses of one call to the copy that made it."""

    def __init__(self, services: CopyServices, number: int, *, many: bool) -> None:
        self._services = services
        self._number = number
        self._many = many

    def respond(self, model: Model, outputs: Tensors | InferenceError, *, final: bool) -> None:
        """See CallListener."""
        self._send(model, outputs, final=final)

    def done(self, model: Model | None, result: Tensors | InferenceError) -> None:
        """See CallListener."""
        self._services.ended(self._number)
        self._send(model, result, final=True)

    def _send(self, model: Model | None, result: Tensors | InferenceError, *, final: bool) -> None:
        header: dict[str, Any] = {"call": self._number, "final": final}
        tensors: list[WireTensor] = []
        if isinstance(result, InferenceError):
            header["error"] = code_of(result)
        elif model is not None:
            for name, array in result.items():
                spec = model.outputs[name]
                tensors.append(to_wire(name, BY_WIRE[spec.datatype.wire], spec.to_client(array)))
            if isinstance(result, RemarkedAnswer):
                header["p"] = dict(result.parameters)
        self._services.reply(header, tensors)


def _parameters(header: Mapping[str, Any]) -> dict[str, Parameter]:
    """The parameters of a call, with those of a sequence as clients send them."""
    parameters: dict[str, Parameter] = dict(header["p"])
    if header["correlation"]:
        parameters[SEQUENCE] = header["correlation"]
        parameters[START] = bool(header["flags"] & 1)
        parameters[END] = bool(header["flags"] & 2)
    if header["timeout"]:
        parameters[TIMEOUT] = header["timeout"]
    return parameters
