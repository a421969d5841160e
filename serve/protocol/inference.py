"""ModelInfer: from a request's bytes to the queue, and from the answer to a response's bytes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from protos.inference_pb2 import ModelInferRequest
from serve.engine.errors import BackendError, InferenceError, InvalidArgumentError
from serve.engine.inference_core import InferenceCore
from serve.engine.requests import InferRequest
from serve.engine.tensors import Array, Tensors
from serve.protocol.codec import decode_inputs, input_forms
from serve.protocol.infer_wire import cut_request
from serve.protocol.messages import parse
from serve.protocol.request_forms import RequestForm, RequestForms
from serve.protocol.shared_memory import SharedMemory
from serve.protocol.wanted_outputs import WantedOutput, special_response, wanted_names, wanted_specially

logger = logging.getLogger(__name__)

Reply = Callable[[bytes | InferenceError], None]
Cancel = Callable[[], None]


class Inference:
    """Checks requests, queues them and serializes their answers. A form of request is parsed once (see `infer_wire`)."""

    def __init__(self, core: InferenceCore, memory: SharedMemory) -> None:
        self._core = core
        self._memory = memory
        self._forms = RequestForms()

    def infer(self, data: bytes, time_left_s: float | None, reply: Reply) -> Cancel:
        """Check a request and queue it; `reply` is called once, later, on the event loop.

        Args:
            data: a ModelInferRequest as received.
            time_left_s: until the client's deadline, in seconds; None where it has none.
            reply: gets the ModelInferResponse as it goes out, or the error.

        Returns:
            A function to call when the client has gone.

        Raises:
            InferenceError: the request is wrong or cannot be taken; `reply` is not called then.
        """
        cut = cut_request(data)
        form = self._forms.find(cut)
        inputs = None if form is None or cut is None else form.arrays(data, cut.raw)
        if form is None or cut is None or inputs is None:
            request = parse(ModelInferRequest, data)
            form, inputs = self._checked(request)
            request_id = request.id.encode()
            special = wanted_specially(request, form.model, self._memory)
            if form.inputs and not special:
                self._forms.keep(cut, form)
        else:
            request_id = cut.id
            special = {}
        queued = InferRequest(
            inputs=inputs,
            outputs=form.outputs,
            rows=form.rows,
            bucket=object() if form.bucket is None else form.bucket,
            deadline=_in(form.turn.drop_after_s, time_left_s),
            priority=form.turn.level,
            patience=_in(form.turn.delay_after_s),
            done=partial(self._answer, form, request_id, special, reply),
        )
        self._core.submit(form.model, queued)
        return partial(form.model.batcher.cancel, queued)

    def _checked(self, request: ModelInferRequest) -> tuple[RequestForm, dict[str, Array]]:
        model = self._core.model(request.model_name, request.model_version)
        decoded = decode_inputs(request, model, self._memory)
        form = RequestForm(
            model=model,
            inputs=input_forms(request, model),
            outputs=wanted_names(request, model),
            rows=decoded.rows,
            bucket=decoded.bucket,
            turn=model.queue_policy.turn(_whole(request, "priority", "the priority"), _timeout(request)),
        )
        return form, decoded.inputs

    def _answer(
        self,
        form: RequestForm,
        request_id: bytes,
        special: dict[str, WantedOutput],
        reply: Reply,
        result: Tensors | InferenceError,
    ) -> None:
        if isinstance(result, InferenceError):
            reply(result)
            return
        try:
            if special:
                response = special_response(form.model, request_id, result, special, self._memory)
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


def _in(*seconds: float | None) -> float | None:
    """The earliest of these times from now, on time.monotonic()'s clock; None where there is none."""
    limits = [limit for limit in seconds if limit is not None]
    return time.monotonic() + min(limits) if limits else None
