"""ModelInfer: from a request's bytes to the queue, and from the answer to a response's bytes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from protos.inference_pb2 import ModelInferRequest
from serve.engine.errors import BackendError, InferenceError, InvalidArgumentError
from serve.engine.inference_core import InferenceCore
from serve.engine.model import Model
from serve.engine.requests import Done, InferRequest, RawInputs, RawLayout
from serve.engine.tensors import Tensors
from serve.protocol.codec import decode_inputs, input_places, raw_layout
from serve.protocol.infer_wire import cut_request
from serve.protocol.messages import check_fields, parse
from serve.protocol.request_forms import RequestForm, RequestForms
from serve.protocol.shared_memory import SharedMemory
from serve.protocol.wanted_outputs import special_response, wanted_names, wanted_specially
from serve.protocol.written_apart import WrittenApart

logger = logging.getLogger(__name__)

Reply = Callable[[bytes | InferenceError], None]
Cancel = Callable[[], None]


class Watch(Protocol):
    """Who follows one request."""

    def taken(self, model: Model, request_id: bytes, request: InferRequest) -> None:
        """It is right, and about to be queued."""


class Inference:
    """Checks requests, queues them and serializes their answers. A form of request is parsed once (see `infer_wire`)."""

    def __init__(self, core: InferenceCore, memory: SharedMemory) -> None:
        self._core = core
        self._memory = memory
        self._forms = RequestForms()
        core.on_change(self._forms.forget)

    def infer(self, data: bytes | memoryview, time_left_s: float | None, reply: Reply, watch: Watch | None = None) -> Cancel:
        """Check a request and queue it; `reply` is called once, later, on the event loop.

        Args:
            data: a ModelInferRequest as received; a large one may be a view, which nobody writes to any more.
            time_left_s: until the client's deadline, in seconds; None where it has none.
            reply: gets the ModelInferResponse as it goes out, or the error.
            watch: is told what the request is before it is queued; None tells nobody.

        Returns:
            A function to call when the client has gone.

        Raises:
            InferenceError: the request is wrong or cannot be taken; `reply` is not called then.
        """
        twin = self._forms.twin(data)
        try:
            request_id = b"" if twin is None else bytes(data[twin.id_start : twin.id_end])
            if twin is not None and (not request_id or request_id.isascii()):
                form = twin.form
                inputs = self._raw_inputs(form, twin.layout, data, twin.offsets)
            else:
                form, request_id, inputs = self._understand(bytes(data))
        except InferenceError as error:
            self._core.figures.refuse(error)
            raise
        turn = form.turn
        apart: WrittenApart | None = None
        answer: Done
        if form.takes_long:
            apart = WrittenApart(partial(self._written, form, request_id, self._memory.latest), reply, self._core.wait_for)
            answer = apart.done
        else:
            answer = partial(self._answer, form, request_id, reply)
        queued = InferRequest(
            inputs,
            form.outputs,
            form.rows,
            form.bucket,
            None if time_left_s is None else _in(time_left_s),
            answer,
            turn.level,
            None if turn.delay_after_s is None else _in(turn.delay_after_s),
            None if turn.drop_after_s is None else _in(turn.drop_after_s),
            len(data) + form.shared_bytes,
        )
        if watch is not None:
            watch.taken(form.model, request_id, queued)
        self._core.submit(form.model, queued)
        return partial(form.model.batcher.cancel, queued) if apart is None else partial(_cancel, form.model, queued, apart)

    def failed(self, data: bytes, error: Exception) -> None:
        """Called by transports for a request that got an error. Nobody listens here (see `observed_inference`)."""

    def gone(self, data: bytes) -> None:
        """Called by transports for a request whose client has gone before its answer. As `failed`."""

    def _understand(self, data: bytes) -> tuple[RequestForm, bytes, Tensors]:
        check_fields(data)
        cut = cut_request(data)
        form = self._forms.find(cut)
        offsets = None if form is None or cut is None else form.offsets(cut.raw)
        if form is not None and form.layout is not None and cut is not None and offsets is not None:
            self._forms.keep_twin(data, cut, form)
            return form, cut.id, self._raw_inputs(form, form.layout, data, offsets)
        request = parse(ModelInferRequest, data)
        form, decoded = self._checked(request)
        self._forms.keep(cut, form)
        return form, request.id.encode(), decoded

    def _raw_inputs(self, form: RequestForm, layout: RawLayout, data: bytes | memoryview, offsets: tuple[int, ...]) -> Tensors:
        for place in form.places:  # its region may be gone, or another one by now
            self._memory.check(place)
        if form.lying is None:
            return RawInputs(layout, data, offsets)
        read = partial(self._memory.read_into, since=self._memory.latest)
        readers = tuple([None if place is None else partial(read, place) for place in form.lying])
        return RawInputs(layout, data, offsets, readers)

    def _checked(self, request: ModelInferRequest) -> tuple[RequestForm, Tensors]:
        model = self._core.model(request.model_name, request.model_version)
        decoded = decode_inputs(request, model, self._memory)
        outputs = wanted_names(request, model)
        special = wanted_specially(request, model, self._memory)
        lying = input_places(request)
        places = [place for place in (*lying, *(wanted.place for wanted in special.values())) if place is not None]
        form = RequestForm(
            model=model,
            layout=raw_layout(request, model),
            outputs=outputs,
            rows=decoded.rows,
            bucket=decoded.bucket,
            turn=model.queue_policy.turn(_whole(request, "priority", "the priority"), _timeout(request)),
            lying=tuple(lying) if any(lying) else None,
            places=tuple(places),
            special=special,
        )
        return form, decoded.inputs

    def _written(
        self, form: RequestForm, request_id: bytes, since: int, result: Tensors | InferenceError
    ) -> bytes | InferenceError:
        written: list[bytes | InferenceError] = []
        self._answer(form, request_id, written.append, result, since=since)
        return written[0]

    def _answer(
        self,
        form: RequestForm,
        request_id: bytes,
        reply: Reply,
        result: Tensors | InferenceError,
        *,
        since: int = 0,
    ) -> None:
        if isinstance(result, InferenceError):
            reply(result)
            return
        try:
            if form.placed is not None:
                response = form.placed.response(request_id, result, self._memory, since)
            elif form.special:
                response = special_response(form.model, request_id, result, form.special, self._memory, since)
            else:
                response = form.response(request_id, result)
        except InferenceError as error:
            reply(error)
            return
        except Exception as error:
            name = form.model.name
            logger.exception("the answer of %s does not fit its interface", name)
            reply(BackendError(f"model {name!r} answered what its interface does not declare: {type(error).__name__}"))
            return
        reply(response)


def _cancel(model: Model, queued: InferRequest, apart: WrittenApart) -> None:
    apart.gone()
    model.batcher.cancel(queued)


def _timeout(request: ModelInferRequest) -> float | None:
    """The request parameter `timeout`, in seconds."""
    microseconds = _whole(request, "timeout", "microseconds")
    return microseconds / 1e6 if microseconds else None


def _whole(request: ModelInferRequest, name: str, what: str) -> int:
    """A request parameter that is a whole number; 0 where it is not there."""
    parameter = request.parameters.get(name)
    if parameter is None:
        return 0
    choice = parameter.WhichOneof("parameter_choice")
    number: int = getattr(parameter, choice) if choice in {"int64_param", "uint64_param"} else -1
    if number < 0:
        raise InvalidArgumentError(f"parameter {name!r} is no whole number of 0 or more, expected {what} as an int64")
    return number


def _in(seconds: float) -> float:
    """So long from now, on time.monotonic()'s clock."""
    return time.monotonic() + seconds
