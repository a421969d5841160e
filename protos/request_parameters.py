"""Parameters of an inference request that mean something to the server; a client may add others, which models receive.

The header forwarding, the response cache, Python models and the reference page read this table. A header that is forwarded sets
none of these parameters, and a Python model does not get them among its `parameters`.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_parameters.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

PRIORITY: Final = "priority"
TIMEOUT: Final = "timeout"
SEQUENCE_ID: Final = "sequence_id"
SEQUENCE_START: Final = "sequence_start"
SEQUENCE_END: Final = "sequence_end"
EMPTY_FINAL: Final = "triton_enable_empty_final_response"
BINARY_OUTPUTS: Final = "binary_data_output"
CAPTURE: Final = "halfserve.capture"
TIMINGS: Final = "halfserve.timings"
RESERVED_PREFIX: Final = "triton_"  # a client's own parameter must not begin with this


@dataclass(frozen=True, kw_only=True)
class RequestParameter:
    """A parameter of inference requests. The documentation's table of request parameters is generated from these.

    Attributes:
        values: description of the values, which an error text quotes.
        meaning: description of the parameter's effect.
        changes_answer: whether requests that differ in this parameter may have different answers, so that the response cache
            keeps them apart.
    """

    values: str
    meaning: str
    changes_answer: bool = True


REQUEST_PARAMETERS: Final[Mapping[str, RequestParameter]] = {
    PRIORITY: RequestParameter(
        values="the priority as an int64",
        meaning="The level of the model's queue: 1 is the most urgent. 0 or none is the model's default.",
        changes_answer=False,
    ),
    TIMEOUT: RequestParameter(
        values="microseconds as an int64",
        meaning="The longest time in the queue, where the model lets requests set it. 0 or none is the model's default.",
        changes_answer=False,
    ),
    SEQUENCE_ID: RequestParameter(
        values="a whole number or a string",
        meaning="The sequence of a stateful model that the request belongs to.",
    ),
    SEQUENCE_START: RequestParameter(
        values="true or false", meaning="The request is the first of its sequence, which begins with the initial state."
    ),
    SEQUENCE_END: RequestParameter(
        values="true or false", meaning="The request is the last of its sequence, whose state is then dropped."
    ),
    EMPTY_FINAL: RequestParameter(
        values="true or false",
        meaning="A decoupled model's last response comes without outputs, if the model has none left when it ends.",
        changes_answer=False,
    ),
    BINARY_OUTPUTS: RequestParameter(
        values="true or false",
        meaning="Over REST: outputs that the request does not name are answered as bytes behind the JSON.",
    ),
    CAPTURE: RequestParameter(
        values="true or false",
        meaning="false: the request is not captured, even if the server captures requests.",
        changes_answer=False,
    ),
    TIMINGS: RequestParameter(
        values="true or false",
        meaning="The response has its times as parameters: halfserve.queue_ms, halfserve.compute_ms and halfserve.total_ms.",
        changes_answer=False,
    ),
}
