"""Requests and responses of the engine as messages to and from a model's process."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from halfserve.protos import triton_errors
from halfserve.protos.datatypes import BY_WIRE, Datatype
from halfserve.protos.request_parameters import PRIORITY, REQUEST_PARAMETERS, SEQUENCE_END, SEQUENCE_ID, SEQUENCE_START, TIMEOUT
from halfserve.serve.backends.python_child.triton_tensors import deserialize_bytes_tensor, serialize_byte_tensor
from halfserve.serve.backends.python_child.wire import WireTensor
from halfserve.serve.engine import errors
from halfserve.serve.engine.errors import BackendError, InferenceError, ModelLoadError, Wording, told_code, told_text
from halfserve.serve.engine.requests import InferRequest, Parameter, RemarkedAnswer
from halfserve.serve.engine.tensors import ANY_SIZE, Array, Tensors, TensorSpec

logger = logging.getLogger(__name__)

# Triton's codes of errors, by number; what is not here is INTERNAL.
BY_CODE: dict[int, type[InferenceError]] = {
    0: errors.UnknownError,
    2: errors.NotFoundError,
    3: errors.InvalidArgumentError,
    4: errors.UnavailableError,
    5: errors.UnsupportedError,
    6: errors.AlreadyExistsError,
    7: errors.RequestCancelledError,
}
CODES: dict[type[Exception], int] = {
    **{error: code for code, error in BY_CODE.items()},
    errors.DeadlineExceededError: 4,
    errors.QueueFullError: 4,
    errors.OverloadedError: 4,
    errors.FailedPreconditionError: 5,
}
INTERNAL = 1
BY_STATUS = {
    triton_errors.INVALID_ARGUMENT: 3,
    triton_errors.NOT_FOUND: 2,
    triton_errors.INTERNAL: 1,
    triton_errors.UNAVAILABLE: 4,
}
TEXT_BYTES = 1 << 14  # converting more texts or numbers takes longer than the way to a thread and back


def request_message(request: InferRequest, number: int, model: str, version: int) -> dict[str, Any]:
    """Return a request without its tensors, for `InferenceRequest.received`."""
    message: dict[str, Any] = {
        "number": number,
        "model": model,
        "version": version,
        "outputs": request.outputs,
        "n": len(request.inputs),
    }
    if request.id:
        message["id"] = request.id.decode()
    given = request.parameters
    if given:
        message["p"] = {name: value for name, value in given.items() if name not in REQUEST_PARAMETERS}
        message["correlation"] = given.get(SEQUENCE_ID, 0)
        message["flags"] = bool(given.get(SEQUENCE_START)) + 2 * bool(given.get(SEQUENCE_END))
        message["priority"], message["timeout"] = given.get(PRIORITY, 0), given.get(TIMEOUT, 0)
    return message


def to_wire(name: str, datatype: Datatype, array: Array) -> WireTensor:
    """Return an array in the dtype of its datatype, for a message."""
    if datatype.itemsize is None:
        return WireTensor(name, datatype.wire, array.shape, np.frombuffer(serialize_byte_tensor(array) or b"", np.uint8))
    data = array.view(np.uint16) if datatype.numpy is None else array
    return WireTensor(name, datatype.wire, array.shape, data)


def from_wire(tensor: WireTensor) -> Array:
    """Return a received tensor as an array, a view unless it is BYTES.

    Raises:
        ValueError: BYTES that are cut off, or do not fit the shape.
    """
    datatype = BY_WIRE[tensor.datatype]
    if datatype.itemsize is None:
        return deserialize_bytes_tensor(tensor.data).reshape(tensor.shape)
    return tensor.data.view(datatype.array_dtype) if datatype.numpy is None else tensor.data


def error_of(given: Sequence[Any]) -> InferenceError:
    """Return the error of a response: [code, text]."""
    kind = BY_CODE.get(given[0], BackendError)
    return kind(str(given[1]).strip().split("\n")[0] or "the model failed on this request")


def code_of(error: InferenceError | ModelLoadError) -> list[Any]:
    """Return the reverse of `error_of`."""
    code = BY_STATUS.get(told_code(error) or 0) if isinstance(error, InferenceError) else None
    return [CODES.get(type(error), INTERNAL) if code is None else code, told_text(error)]


def phrases_of_models() -> dict[str, str]:
    """Return Triton's texts of errors that the processes of Python models raise, by name; none if they are not wanted."""
    return {phrase.name: phrase.text for phrase in triton_errors.OF_PYTHON_MODELS} if Wording.as_triton else {}


class ResponseReader:
    """Checks the responses of one model against its configuration."""

    def __init__(self, label: str, specs: Sequence[TensorSpec], *, batched: bool, is_strict: bool, keeps_rows: bool) -> None:
        """Make it for one model.

        Args:
            label: names the model in errors.
            specs: names, datatypes and shapes of its outputs.
            batched: their shapes begin with a batch dimension.
            is_strict: any other shape than the configuration's is an error. Otherwise a warning names it once, as Triton lets
                it pass.
            keeps_rows: a response has as many rows as its request, where the model is batched.
        """
        self._label = label
        self._specs = {spec.name: spec for spec in specs}
        self._batched = batched
        self._is_strict = is_strict
        self._keeps_rows = keeps_rows and batched
        self._warned_of: set[str] = set()

    def outputs(
        self, wanted: Sequence[str], rows: int, tensors: Sequence[WireTensor], parameters: Mapping[str, Parameter] | None
    ) -> Tensors | InferenceError:
        """Return the wanted outputs of a response, in the model's order; or why they do not fit the configuration.

        A response may leave outputs out, as in Triton. `rows`: of the request.
        """
        given: dict[str, Array] = {}
        for tensor in tensors:
            spec = self._specs.get(tensor.name)
            if spec is None:
                known = ", ".join(map(repr, self._specs))
                return BackendError(f"model {self._label} answered an output {tensor.name!r}, its configuration has {known}")
            try:
                array = _converted(from_wire(tensor), spec.datatype)
            except ValueError as error:
                return BackendError(f"output {tensor.name!r} of model {self._label} {error}")
            mismatch = self._mismatch(array.shape, spec)
            if mismatch is None and self._keeps_rows and array.size and array.shape[:1] != (rows,):
                mismatch = f"has shape {list(array.shape)}, expected {rows} row(s) as in the request"
            if mismatch is not None:
                text = f"output {tensor.name!r} of model {self._label} {mismatch}"
                # Clients of a reshaped output get it in another shape.
                if self._is_strict or spec.model_shape is not None:
                    return BackendError(text)
                self._warn(tensor.name, text)
            given[tensor.name] = array
        outputs = {name: given[name] for name in wanted if name in given}
        return RemarkedAnswer(outputs, parameters) if parameters else outputs

    def is_quick(self, tensors: Sequence[WireTensor]) -> bool:
        """Return whether `outputs` takes little time: it converts no large output. Others stay views."""
        for tensor in tensors:
            spec = self._specs.get(tensor.name)
            if tensor.data.nbytes > TEXT_BYTES and (
                spec is None or tensor.datatype != spec.datatype.wire or spec.datatype.itemsize is None
            ):
                return False
        return True

    def _warn(self, name: str, text: str) -> None:
        if name not in self._warned_of:
            self._warned_of.add(name)
            about = {"model": self._label}
            logger.warning("%s; it is passed on, unless the model has halfserve.strict_outputs", text, extra=about)

    def _mismatch(self, shape: tuple[int, ...], spec: TensorSpec) -> str | None:
        expected = spec.shape if spec.model_shape is None else spec.model_shape
        fits = len(shape) == len(expected) and all(e in {ANY_SIZE, g} for g, e in zip(shape, expected, strict=True))
        if fits:
            return None
        batch = ", with the batch first" if self._batched else ""
        return f"has shape {list(shape)}, its configuration has {list(expected)} (-1 takes any size{batch})"


def _converted(array: Array, datatype: Datatype) -> Array:
    """Return an output in the dtype of the configuration.

    Floating-point numbers are converted, and other numbers where each keeps its value: `np.array([0])` is an INT64 that an
    INT32 output means.

    Raises:
        ValueError: a number would change.
    """
    wanted = datatype.array_dtype
    if array.dtype == wanted:
        return array
    if not array.size:  # without values, as `np.array([])`, which is FP64 whatever it stands for
        return np.empty(array.shape, wanted)
    kinds = array.dtype.kind, wanted.kind
    if kinds == ("f", "f"):
        with np.errstate(over="ignore"):
            return array.astype(wanted)
    if set(kinds) <= set("biuf"):
        with np.errstate(invalid="ignore", over="ignore"):
            converted = array.astype(wanted)
            if np.array_equal(converted.astype(array.dtype), array):
                return converted
        raise ValueError(f"has {array.dtype} values from {array.min()} to {array.max()}, which {datatype.wire} cannot hold")
    raise ValueError(f"has dtype {array.dtype}, its configuration has {datatype.config_name}")
