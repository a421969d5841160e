"""One copy of a Python model behind the engine's interface."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakMethod

import numpy as np

from halfserve.protos.triton_errors import TritonPhrase
from halfserve.serve.backends.python.deliveries import Failure, ReadingProgress, ResponseDelivery
from halfserve.serve.backends.python.model_runners import ChildFailedError, Runner
from halfserve.serve.backends.python.open_requests import OpenRequests
from halfserve.serve.backends.python.process_messages import (
    TEXT_BYTES,
    ResponseReader,
    error_of,
    phrases_of_models,
    request_message,
    to_wire,
)
from halfserve.serve.backends.python.readiness import ReadinessCheck
from halfserve.serve.backends.python.services import CopyServices, Services, log_failure
from halfserve.serve.backends.python_child.server_access import response_bytes
from halfserve.serve.backends.python_child.wire import WireTensor
from halfserve.serve.engine.backend import RESCHEDULE, ModelInterface, Outcome, RequestBackend
from halfserve.serve.engine.errors import BackendError, InferenceError, InstanceLostError, UnavailableError
from halfserve.serve.engine.execution.output_backlog import OutputBacklog
from halfserve.serve.engine.requests import CallingExecution, InferRequest
from halfserve.serve.engine.results import BegunBatch, LaterAnswer
from halfserve.serve.engine.sequences.slot_batches import SlotInputs
from halfserve.serve.engine.tensors import LateInputs, Tensors

logger = logging.getLogger(__name__)

FINALIZE_S = 30.0  # as in Triton
# Larger batches are written by a thread: the loop would stand still meanwhile.
LOOP_BYTES = 1 << 20
LOOP_REQUESTS = 32


# Starts a runner, given what takes its events and what is called at its end.
Start = Callable[[Callable[[Mapping[str, Any], list[WireTensor]], None], Callable[[], None]], Runner]


@dataclass(frozen=True, kw_only=True)
class PythonModel:
    """A version of a Python model; all its copies share this.

    Attributes:
        name: name of the model.
        version: its number.
        interface: inputs and outputs as the model sees them.
        batched: its tensors begin with a batch dimension.
        is_decoupled: it gives any number of responses to a request.
        path: path of its model.py.
        has_strict_outputs: outputs of other shapes than configured are errors.
    """

    name: str
    version: int
    interface: ModelInterface
    batched: bool
    is_decoupled: bool
    path: str
    has_strict_outputs: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}/{self.version}"


class _Execution(NamedTuple):
    """A batch as a model's process executes it.

    Attributes:
        header: header of its message.
        tensors: inputs of all its requests.
        numbered: its requests by their numbers in messages.
        unasked: numbers of the requests that stand for slots of sequences without one; their answers are dropped.
        failed: errors of requests whose inputs cannot be read, by their places in the batch.
        caller: the execution as the models that it calls know it.
    """

    header: dict[str, Any]
    tensors: list[WireTensor]
    numbered: Mapping[int, InferRequest]
    unasked: Collection[int]
    failed: Mapping[int, InferenceError]
    caller: CallingExecution


class PythonBackend(RequestBackend):
    """A model.py that runs."""

    def __init__(self, model: PythonModel, provider: str, services: Services, start: Start) -> None:
        """Start the runner; `load` makes it ready."""
        self.provider = provider
        self.precision = "model.py's own types"
        self._model = model
        self._services = services
        self._dtypes = {spec.name: spec.datatype for spec in model.interface.inputs}
        self._reader = ResponseReader(
            repr(model.name),
            model.interface.outputs,
            batched=model.batched,
            is_strict=model.has_strict_outputs,
            keeps_rows=not model.is_decoupled,
        )
        texts = any(datatype.itemsize is None for datatype in self._dtypes.values())
        self._loop_bytes = TEXT_BYTES if texts else LOOP_BYTES
        self._begun: _Execution | None = None
        self._numbers = count()
        self._open = OpenRequests()
        self._progress: dict[int, ReadingProgress] = {}  # one per request of a decoupled model, by number
        self._backlog = OutputBacklog()
        self._copy = CopyServices(services, model.label)
        ask = partial(self._copy.reply, {"check": True}, [])
        self._readiness = ReadinessCheck(services.connected, model.label, ask)
        self._checks_readiness = False  # whether the model has an is_ready
        # The runner's threads hold no reference to this object: a copy that is dropped takes its process along.
        event, ended = WeakMethod(self._event), WeakMethod(self._ended)

        def on_event(header: Mapping[str, Any], tensors: list[WireTensor]) -> None:
            handle = event()
            if handle is not None:
                handle(header, tensors)

        def on_end() -> None:
            handle = ended()
            if handle is not None:
                handle()

        self._runner = start(on_event, on_end)
        self._copy.answer = self._runner.answer

    def __del__(self) -> None:
        if hasattr(self, "_runner"):
            self._runner.kill()

    def load(self, arguments: Mapping[str, str]) -> None:
        """Import and initialize the model.

        Raises:
            ChildFailedError: it fails.
            InstanceLostError: the process has ended.
        """
        model = self._model
        self._copy.calls.is_loading = True
        try:
            header = {"k": "load", "path": model.path, "arguments": dict(arguments), "decoupled": model.is_decoupled}
            self._checks_readiness = self._runner.call(header | {"phrases": phrases_of_models()})[0]["checks_readiness"]
        finally:
            self._copy.calls.is_loading = False

    @property
    def caller(self) -> CallingExecution | None:
        """See `RequestBackend`."""
        return self._copy.calls.caller

    async def is_ready(self) -> bool:
        """See `RequestBackend`."""
        return not self._checks_readiness or await self._readiness.is_ready()

    def compute_dtype(self, name: str) -> np.dtype[Any]:
        """See `Backend`."""
        return self._dtypes[name].array_dtype

    def run(self, inputs: Tensors) -> Tensors:
        """See `Backend`."""
        model = self._model
        rows = len(next(iter(inputs.values()))) if model.batched and inputs else 1
        outputs = tuple(spec.name for spec in model.interface.outputs)
        (answer,) = self.compute([InferRequest(inputs, outputs, rows, None, None, lambda _: None)])
        if isinstance(answer, InferenceError):
            raise answer
        return answer if isinstance(answer, Mapping) else {}

    def begin(self, requests: Sequence[InferRequest], batch: BegunBatch) -> bool:
        """See `RequestBackend`. Requests whose bytes take long to copy or to convert are left to a thread."""
        size = sum([request.size for request in requests])
        is_long = (
            size > self._loop_bytes or len(requests) > LOOP_REQUESTS or any(type(one.inputs) is LateInputs for one in requests)
        )
        if is_long or self._is_lost:
            self._runner.let_go()
            return False
        execution = self._executed(requests)

        def came(tensors: Sequence[WireTensor] | None) -> None:
            batch.ready(at_once=tensors is not None and self._reader.is_quick(tensors))

        is_begun = bool(execution.numbered) and self._runner.begin(execution.header, execution.tensors, came)
        self._begun = execution  # not if an error was raised: nothing has been sent then
        return is_begun

    @property
    def _is_lost(self) -> bool:
        """Whether the process has ended, and with it the responses that a decoupled model still owes."""
        return self._model.is_decoupled and self._open.has_ended

    def let_go(self) -> None:
        """See `RequestBackend`."""
        self._runner.let_go()

    def compute(self, requests: Sequence[InferRequest]) -> list[Outcome]:
        """See `RequestBackend`."""
        if self._begun is None and self._is_lost:  # none of these was executed: another copy can take them
            raise InstanceLostError(f"the process of {self._model.label} has ended")
        execution, self._begun = self._begun, None
        is_begun = execution is not None
        if execution is None:
            execution = self._executed(requests)
        failed, numbered = execution.failed, execution.numbered
        try:
            answers = self._answers(execution, is_begun=is_begun) if numbered else []
        finally:
            self._copy.calls.caller = None
            execution.caller.end()
            if not self._model.is_decoupled:
                self._open.discard(numbered)
        if execution.unasked:
            answers = [answer for number, answer in zip(numbered, answers, strict=True) if number not in execution.unasked]
        if not failed:
            return answers
        rest = iter(answers)
        return [failed[place] if place in failed else next(rest) for place in range(len(requests))]

    def _executed(self, requests: Sequence[InferRequest]) -> _Execution:
        """Begin an execution, whose message is still to be sent."""
        model = self._model
        messages: list[dict[str, Any]] = []
        tensors: list[WireTensor] = []
        failed: dict[int, InferenceError] = {}
        numbered: dict[int, InferRequest] = {}
        unasked = set[int]()
        for place, request in enumerate(requests):
            inputs = request.inputs
            empty = [] if type(inputs) is not SlotInputs else [_empty_slot(request, row) for row in inputs.before()]
            try:
                given = [
                    to_wire(name, self._dtypes[name], values[name])
                    for values in (*[slot.inputs for slot in empty], inputs.own if type(inputs) is SlotInputs else inputs)
                    for name in values
                ]
            except InferenceError as error:
                failed[place] = error
                continue
            for one in (*empty, request):
                number = next(self._numbers)
                numbered[number] = one
                messages.append(request_message(one, number, model.name, model.version))
                if one is not request:
                    unasked.add(number)
            tensors += given
        self._open.add(numbered)
        if model.is_decoupled:
            for number, request in numbered.items():
                self._progress[number] = progress = ReadingProgress(self._copy.reply, number)
                request.progress = progress
        self._copy.calls.caller = caller = CallingExecution(model.label, tuple(numbered.values()))
        return _Execution({"k": "execute", "requests": messages}, tensors, numbered, unasked, failed, caller)

    def _answers(self, execution: _Execution, *, is_begun: bool) -> list[Outcome]:
        numbered = execution.numbered
        try:
            reply, outputs = self._runner.reply() if is_begun else self._runner.call(execution.header, execution.tensors)
        except ChildFailedError as error:
            log_failure(self._model.label, str(error), error.trace)
            if self._model.is_decoupled:
                return [None] * len(numbered)  # the process has sent the error as each one's final response
            failure = BackendError(f"model {self._model.name!r} failed on this request: {error}")
            failure.like(TritonPhrase.MODEL_FAILED, model=self._model.name)
            return [
                self._later_answer(number, request) if place in error.sent else failure
                for place, (number, request) in enumerate(numbered.items())
            ]
        except InstanceLostError:
            if not self._model.is_decoupled:
                raise
            return self._lost(numbered)
        if self._is_lost:
            return self._lost(numbered)
        answers: list[Outcome] = []
        at = 0
        for (number, request), message in zip(numbered.items(), reply["responses"], strict=True):
            if message is None:
                answers.append(None if self._model.is_decoupled else self._later_answer(number, request))
            elif "rescheduled" in message:
                self._open.receiver(number, final=True)  # it gets another number
                answers.append(RESCHEDULE)
            else:
                end = at + message["n"]
                answers.append(self._response(request, message, outputs[at:end]))
                at = end
        return answers

    def _later_answer(self, number: int, request: InferRequest) -> Tensors | InferenceError | LaterAnswer:
        """Return the answer of a request that the model left to its response sender."""
        answer = self._open.leave_open(number, request)
        return self._lost_error() if answer is None else answer

    def _response(
        self, request: InferRequest, message: Mapping[str, Any], tensors: list[WireTensor]
    ) -> Tensors | InferenceError:
        if "error" in message:
            return error_of(message["error"])
        rows = 1 if type(request.inputs) is SlotInputs else request.rows
        return self._reader.outputs(request.outputs, rows, tensors, message.get("p"))

    def _lost(self, numbered: Mapping[int, InferRequest]) -> list[Outcome]:
        """Errors for requests of a decoupled model whose process has ended; those with a final response are done."""
        error = self._lost_error()
        return [error if is_open else None for is_open in self._open.lose(numbered)]

    def _lost_error(self) -> InferenceError:
        return UnavailableError(
            f"the process of model {self._model.name!r} ended before its final response; send the request again"
        )

    def _event(self, header: Mapping[str, Any], tensors: list[WireTensor]) -> None:
        """On the thread of the runner's events."""
        if header["k"] == "is_cancelled":
            request, progress = self._open.find(header["number"]), self._progress.get(header["number"])
            is_cancelled = request is None or request.cancelled or (progress is not None and progress.is_withdrawn)
            self._copy.reply({"call": header["call"], "cancelled": is_cancelled}, [])
        elif header["k"] == "readiness":
            self._readiness.came(header)
        elif header["k"] == "respond":
            self._respond(header, tensors)
        else:
            self._copy.handle(header, tensors)

    def _respond(self, header: Mapping[str, Any], tensors: list[WireTensor]) -> None:
        number, final, message = header["number"], bool(header["final"]), header.get("response")
        if not self._model.is_decoupled:
            if message is not None:
                self._respond_once(number, message, tensors)
            return
        request = self._open.receiver(number, final=final)
        progress = self._progress.pop(number, None) if final else self._progress.get(number)
        if request is None or progress is None:
            return
        response = None if message is None else self._response(request, message, tensors)
        size = 0 if message is None else response_bytes(tensors)
        self._services.connected().soon(ResponseDelivery(request, response, size, progress, self._backlog, final=final))
        self._backlog.wait()

    def _respond_once(self, number: int, message: Mapping[str, Any], tensors: list[WireTensor]) -> None:
        """Take the one response of a request, from its response sender, which may come before the reply of `execute` or after
        it.
        """
        request = self._open.find(number)
        if request is None:
            return
        response = self._response(request, message, tensors)
        later = self._open.respond(number, response)
        if later is not None:
            self._services.connected().soon(partial(later.give, response))

    def _ended(self) -> None:
        """Fail the requests that the runner, which has gone, should still answer."""
        self._copy.stop()
        caller = self._copy.calls.caller
        left, later = self._open.end(set() if caller is None else set(map(id, caller.requests)))
        if self._services.calls is None:
            return
        self._readiness.ended()
        for answer in later:
            self._services.calls.soon(partial(answer.give, self._lost_error()))
        if self._model.is_decoupled:
            for request in left:
                self._services.calls.soon(Failure(request, self._lost_error()))

    def give_up(self) -> None:
        """Kill the process."""
        self._runner.kill()

    def close(self) -> None:
        """Let the model finalize within FINALIZE_S, and end the process."""
        limit = threading.Timer(FINALIZE_S, self._runner.kill)
        limit.daemon = True
        limit.start()
        try:
            self._runner.call({"k": "finalize"})
        except ChildFailedError as error:
            about = {"model": self._model.label, "trace": error.trace}
            logger.error("%s: %s", self._model.label, error, extra=about)  # noqa: TRY400  (the trace is the child's)
        except InstanceLostError:
            about = {"model": self._model.label}
            logger.warning("%s: its process has ended before the model could finalize", self._model.label, extra=about)
        finally:
            limit.cancel()
        self._runner.kill()


def _empty_slot(request: InferRequest, inputs: Tensors) -> InferRequest:
    """Return the request of a slot without one, as Triton passes it to a model: its controls say that it is not ready."""
    empty = InferRequest(inputs, request.outputs, 1, None, None, lambda _: None)
    empty.cancelled = True  # what the model answers is dropped
    return empty
