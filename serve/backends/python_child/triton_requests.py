"""`pb_utils.InferenceRequest`: a request that a model gets or makes, and its arguments."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

from halfserve.serve.backends.python_child.server_access import ServerAccess, server
from halfserve.serve.backends.python_child.triton_errors import TritonModelException
from halfserve.serve.backends.python_child.triton_responses import (
    REQUEST_KINDS,
    InferenceResponse,
    ResponseIterator,
    ResponseSender,
    checked_parameters,
)
from halfserve.serve.backends.python_child.triton_tensors import Tensor, to_wire

RELEASE_ALL, RELEASE_RESCHEDULE = 1, 2
REQUIRED: Any = None  # the default of arguments that have to be given, behind others that need not
# Arguments of InferenceRequest that None does not stand for.
ARGUMENTS = (
    *("request_id", "correlation_id", "inputs", "requested_output_names", "model_name", "model_version", "flags", "timeout"),
)


class MemoryType(IntEnum):
    """Where tensors should lie."""

    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 2


class PreferredMemory:
    """Where the outputs of a request should lie. Accepted, without effect: they come in the memory of the CPU."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """The trace that a request belongs to."""

    def __init__(self, context: str | None = None) -> None:
        self._context = context

    def get_context(self) -> str | None:
        """Return the trace context; None where it is not traced."""
        return self._context


NO_TRACE = InferenceTrace()


class InferenceRequest:
    """A request that a model gets, or one that it makes."""

    __slots__ = (
        "_access", "_correlation_id", "_flags", "_id", "_inputs", "_is_decoupled", "_model", "_number", "_parameters",
        "_preferred_memory", "_priority", "_release_flags", "_requested", "_sender", "_timeout", "_trace", "_version",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str | bytes = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = REQUIRED,
        requested_output_names: Sequence[str | bytes] = REQUIRED,
        model_name: str | bytes = REQUIRED,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """Make a request to a model of this server; `timeout` in microseconds.

        Raises:
            TypeError: `inputs`, `requested_output_names` or `model_name` is missing, or a value is None.
            TritonModelException: something is of the wrong kind.
        """
        given = (request_id, correlation_id, inputs, requested_output_names, model_name, model_version, flags, timeout)
        for name, value in zip(ARGUMENTS, given, strict=True):
            if value is None:
                raise TypeError(f"InferenceRequest() needs the argument {name!r}, and takes no None for it")
        self._inputs = list(inputs)
        if not all(isinstance(tensor, Tensor) for tensor in self._inputs):
            raise TritonModelException("inputs has something else than pb_utils.Tensor")
        if not isinstance(correlation_id, int | str):
            raise TritonModelException("Correlation ID must be integer or string")
        self._id = text_of(request_id)
        self._correlation_id = correlation_id
        if not all(isinstance(name, str | bytes) for name in requested_output_names):
            raise TypeError(f"requested_output_names is {requested_output_names!r}, expected a list of str")
        self._requested = [text_of(name) for name in requested_output_names]
        self._model = text_of(model_name)
        self._version = int(model_version)
        self._flags = int(flags)
        self._timeout = int(timeout)
        self._preferred_memory = preferred_memory
        self._trace = trace or InferenceTrace()
        self._parameters = checked_parameters(parameters, REQUEST_KINDS)
        self._priority = 0
        self._number = -1
        self._access: ServerAccess | None = None
        self._sender: ResponseSender | None = None
        self._is_decoupled = False
        self._release_flags = RELEASE_ALL

    @classmethod
    def received(
        cls, access: ServerAccess, message: Mapping[str, Any], inputs: list[Tensor], *, is_decoupled: bool
    ) -> InferenceRequest:
        """Return a request that the server, which has checked it, has sent to a model."""
        made = cls.__new__(cls)
        made._receive(access, message, inputs, is_decoupled=is_decoupled)  # noqa: SLF001  (of this class)
        return made

    def _receive(self, access: ServerAccess, message: Mapping[str, Any], inputs: list[Tensor], *, is_decoupled: bool) -> None:
        self._id = message.get("id", "")
        self._correlation_id = message.get("correlation", 0)
        self._inputs = inputs
        self._requested = list(message["outputs"])  # a tuple, where the model runs on a thread of the server
        self._model = message["model"]
        self._version = message["version"]
        self._flags = message.get("flags", 0)
        self._timeout = message.get("timeout", 0)
        self._preferred_memory = None
        self._trace = NO_TRACE
        self._parameters = message.get("p", {})
        self._priority = message.get("priority", 0)
        self._number = message["number"]
        self._access = access
        self._sender = None
        self._is_decoupled = is_decoupled
        self._release_flags = RELEASE_ALL

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def flags(self) -> int:
        """TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END, added."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = int(flags)

    def timeout(self) -> int:
        """In microseconds; 0 without one."""
        return self._timeout

    def priority(self) -> int:
        """1 is the most urgent; 0 is the model's default."""
        return self._priority

    def parameters(self) -> str:
        """Return the parameters as a JSON object."""
        return json.dumps(self._parameters)

    def trace(self) -> InferenceTrace:
        return self._trace

    def preferred_memory(self) -> PreferredMemory | None:
        return self._preferred_memory

    def requested_output_names(self) -> list[str]:
        return self._requested

    def model_name(self) -> str:
        return self._model

    def model_version(self) -> int:
        return self._version

    def set_release_flags(self, flags: int) -> None:
        """Set whether the request ends after execute (TRITONSERVER_REQUEST_RELEASE_ALL, the default), or is queued once more
        (TRITONSERVER_REQUEST_RELEASE_RESCHEDULE).

        Raises:
            TritonModelException: the flags are unknown.
        """
        if flags not in {RELEASE_ALL, RELEASE_RESCHEDULE}:
            raise TritonModelException(
                f"release flags are {flags}, expected TRITONSERVER_REQUEST_RELEASE_ALL ({RELEASE_ALL}) or "
                f"TRITONSERVER_REQUEST_RELEASE_RESCHEDULE ({RELEASE_RESCHEDULE})"
            )
        self._release_flags = flags

    @property
    def is_rescheduled(self) -> bool:
        """Whether the model wants the request once more."""
        return self._release_flags == RELEASE_RESCHEDULE

    def is_cancelled(self) -> bool:
        """Return whether the client of a received request has gone."""
        if self._access is None:
            return False
        return bool(self._access.call("is_cancelled", {"number": self._number}, [])[0].get("cancelled", True))

    def get_response_sender(self) -> ResponseSender:
        """Return the sender of the responses of a received request.

        Raises:
            TritonModelException: this request was made by the model.
        """
        if self._access is None:
            raise TritonModelException("get_response_sender() is for requests that the model has got, not for those it makes")
        if self._sender is None:
            self._sender = ResponseSender(self._access, self._number, is_decoupled=self._is_decoupled)
        return self._sender

    @property
    def asked_sender(self) -> ResponseSender | None:
        """The response sender, if the model has asked for it."""
        return self._sender

    def exec(self, decoupled: bool = False) -> Any:
        """Have the server answer this request: an InferenceResponse, or with `decoupled` an iterator over several.

        An error of the model is the response's; a call that cannot be made raises a TritonModelException.
        """
        return self._exec(server(), decoupled)

    def _exec(self, access: ServerAccess, decoupled: bool) -> Any:
        message, tensors = self._as_call(), to_wire(self._inputs)
        message["decoupled"] = decoupled
        if not decoupled:
            return InferenceResponse.from_reply(access.call("infer", message, tensors))
        replies = access.call_for_many("infer", message, tensors)
        first = next(replies)
        return ResponseIterator(replies, first, partial(access.call, "cancel", {"of": first[0]["call"]}, []))

    async def async_exec(self, decoupled: bool = False) -> Any:
        """`exec` for coroutines: others go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(None, self._exec, server(), decoupled)

    def _as_call(self) -> dict[str, Any]:
        if not self._model:
            raise TritonModelException("the request has no model_name")
        return {
            "id": self._id,
            "model": self._model,
            "version": self._version,
            "outputs": self._requested,
            "correlation": self._correlation_id,
            "flags": self._flags,
            "timeout": self._timeout,
            "p": self._parameters,
        }


def text_of(value: str | bytes) -> str:
    """Return a name, which may be an element of a BYTES tensor."""
    return value.decode() if isinstance(value, bytes) else str(value)
