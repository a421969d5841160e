"""Texts of Triton's errors that clients' programs compare, and its statuses on which they rely.

Where a server speaks as Triton does (`--triton-errors`), its error begins with the text, and has the status if one is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

INVALID_ARGUMENT, NOT_FOUND, INTERNAL, UNAVAILABLE = 3, 5, 13, 14  # gRPC's numbers


class TritonPhrase(Enum):
    """Triton's text for an error, with the names of the facts that it takes, and Triton's status where ours differs.

    Attributes:
        text: a format string.
        code: gRPC's number of the status; None for that of the error's class.
    """

    UNKNOWN_MODEL = "Request for unknown model: '{model}' is not found"
    UNKNOWN_VERSION = "Request for unknown model: '{model}' version {version} is not found"
    NO_VERSION = "Request for unknown model: '{model}' has no available versions"
    VERSION_NOT_READY = "Request for unknown model: '{model}' version {version} is not at ready state", UNAVAILABLE
    UNKNOWN_TRACED_MODEL = "Request for unknown model : {model}"
    CALLED_MODEL_NOT_READY = "Failed for execute the inference request. Model '{model}' is not ready."

    NO_CONTROL = "explicit model load / unload is not allowed if polling is enabled", UNAVAILABLE
    NOT_IN_REPOSITORY = "failed to load '{model}', failed to poll from model repository", INTERNAL
    LOAD_FAILED = "load failed for model '{model}'", INVALID_ARGUMENT

    QUEUE_FULL = "Exceeds maximum queue size", UNAVAILABLE
    QUEUE_TIMEOUT = "Request timeout expired", UNAVAILABLE
    STOPPING = "Server is stopping, scheduler for model has stopped accepting new inference requests"

    INPUT_COUNT = (
        "expected {count} inputs but got {given} inputs for model '{model}'. Got input(s) {names}, but missing required "
        "input(s) {missing}. Please provide all required input(s)."
    )
    INPUT_COUNT_BETWEEN = (
        "expected number of inputs between {required} and {count} but got {given} inputs for model '{model}'. Got input(s) "
        "{names}, but missing required input(s) {missing}. Please provide all required input(s)."
    )
    UNEXPECTED_INPUT = "unexpected inference input '{input}' for model '{model}'"
    UNEXPECTED_OUTPUT = "unexpected inference output '{output}' for model '{model}'"
    DATATYPE = "inference input '{input}' data-type is '{given}', but model '{model}' expects '{expected}'"
    SHAPE = "unexpected shape for input '{input}' for model '{model}'. Expected {expected}, got {given}"
    BATCH_SIZE = "inference request batch-size must be <= {most} for '{model}'"
    BATCH_SIZES_DIFFER = "input '{input}' batch size does not match other inputs for '{model}'"
    BYTE_SIZE = "input byte size mismatch for input '{input}' for model '{model}'. Expected {expected}, got {given}"
    FEW_ELEMENTS = "expected {expected} string elements for inference input '{input}' for model '{model}', got {given}"
    MANY_ELEMENTS = (
        "unexpected number of string elements {given} for inference input '{input}' for model '{model}', expecting {expected}"
    )
    RAW_INPUTS = (
        "Raw request must only have 1 input (found 1) to be deduced but got {count} inputs in '{model}' model configuration"
    )
    RAW_SHAPE = (
        "The shape of the raw input '{input}' can not be deduced because there are more than one variable-sized dimension"
    )
    RAW_BYTES = "For BYTE datatype raw input '{input}', the model must have input shape [1]"

    SEQUENCE_ROWS = "inference request to model '{model}' must specify batch-size 1 due to requirements of sequence batcher"
    NO_SEQUENCE_ID = "inference request to model '{model}' must specify a non-zero or non-empty correlation ID"
    NOT_STARTED = (
        "inference request for sequence {sequence} to model '{model}' must specify the START flag on the first request of the "
        "sequence"
    )
    SEQUENCE_EXPIRED = "timeout of the corresponding sequence has been expired", UNAVAILABLE
    DECOUPLED = "doesn't support models with decoupled transaction policy"

    RESTRICTED_API = "This API is restricted, expecting header '{header}'"
    RESTRICTED_PROTOCOL = "This protocol is restricted, expecting header '{header}'", UNAVAILABLE

    UNKNOWN_REGION = "Unable to find shared memory region: '{region}'"
    UNKNOWN_SYSTEM_REGION = "Unable to find system shared memory region: '{region}'"
    UNKNOWN_CUDA_REGION = "Unable to find cuda shared memory region: '{region}'"
    REGION_EXISTS = "shared memory region '{region}' already in manager"
    REGION_NOT_OPENED = "Unable to open shared memory region: '{key}'", INTERNAL
    REGION_INVALID = "failed to register shared memory region '{region}': invalid args"
    REGION_OFFSET = "Invalid offset for shared memory region: '{region}'"
    REGION_SIZE = "Invalid offset + byte size for shared memory region: '{region}'"

    LOG_FILE = "log file location can not be updated through network protocol"
    TRACE_FILE = "trace file location can not be updated through network protocol"

    MODEL_FAILED = "Failed to process the request(s) for model '{model}', message"
    NOT_NONE = "Python model '{model}' is using the decoupled mode and the execute function must return None."
    RESCHEDULED = "Expected a None object in the execute function return list for reschduled request."
    FINAL_BEFORE_RESPONSE = "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
    SECOND_RESPONSE = "Unable to send response. Non-decoupled model cannot send more than one response."
    SENDER_CLOSED = "Unable to send response. Response sender has been closed."
    BF16 = "Tensor dtype is BF16 and cannot be converted to NumPy."

    NOT_ONE_RESPONSE = "generate expects model to produce exactly 1 response"
    PARAMETER_TYPE = "parameter '{parameter}' has invalid type"
    GENERATE_PARAMETERS = "Expected JSON object for keyword: 'parameters'"
    GENERATE_NESTED = "Converting keyword: 'parameters': parameter '{parameter}' has invalid type."
    GENERATE_TEXT = "attempt to access JSON non-string as string"
    GENERATE_FLAG = "attempt to access JSON non-boolean as boolean"
    GENERATE_TWICE = "input '{input}' already exists in request"

    def __init__(self, text: str, code: int | None = None) -> None:
        self.text = text
        self.code = code

    def before(self, text: str, facts: Mapping[str, object]) -> str:
        """Return Triton's text with the facts, followed by `text`."""
        said = self.text.format_map({name: _shown(value) for name, value in facts.items()})
        return f"{said} {text}" if said.endswith(".") else f"{said}: {text}"


# What the processes of Python models raise themselves.
OF_PYTHON_MODELS = (
    *(TritonPhrase.NOT_NONE, TritonPhrase.FINAL_BEFORE_RESPONSE, TritonPhrase.SECOND_RESPONSE),
    *(TritonPhrase.SENDER_CLOSED, TritonPhrase.BF16, TritonPhrase.RESCHEDULED),
)


def _shown(value: object) -> str:
    """Return a list as Triton shows it, without spaces, and anything else as text."""
    if isinstance(value, list | tuple):
        return f"[{','.join(repr(one) for one in value)}]"
    return str(value)
