"""One malformed message, the check of its answer, and counts of right and wrong answers by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from google.protobuf.message import DecodeError

from halfserve.protos.inference_pb2 import ModelInferResponse
from halfserve.serve.benchmark.load.calls import framed
from tests.serve.faults.exchange import INFER_PATH, Answer, Headers, call_headers, messages_in
from tests.serve.faults.malforming.oracle import Due, due, is_same

Check = Callable[[Answer], str]
INFER_HEADERS = call_headers(INFER_PATH)
SHOWN_BYTES = 4096


@dataclass(frozen=True)
class Case:
    kind: str
    data: bytes  # all bytes to send, including gRPC prefixes
    check: Check  # returns the fault of an answer; "" if it is right
    headers: Headers = field(default=tuple(INFER_HEADERS))
    end: bool = True  # whether the client ends its side; otherwise it stays silent, as if more data were to come
    messages: int = 1  # number of messages that it counts as

    def complaint(self, answer: Answer) -> str:
        """The fault of an answer, with the sent bytes in hexadecimal; "" if the answer is right."""
        wrong = self.check(answer)
        if not wrong:
            return ""
        shown, more = self.data[:SHOWN_BYTES].hex(), len(self.data) - SHOWN_BYTES
        return f"{wrong}; sent: {shown}" + (f" and {more} bytes more" if more > 0 else "")


def infer_case(kind: str, message: bytes) -> Case:
    """A ModelInfer call whose message the oracle judges."""
    return Case(kind, framed(message), partial(_unary_complaint, due(message)))


def refused(kind: str, data: bytes, *codes: int, headers: Headers | None = None, end: bool = True) -> Case:
    """A call that must end with one of these gRPC statuses."""
    return Case(kind, data, partial(_code_complaint, frozenset(codes)), tuple(headers or INFER_HEADERS), end)


def turned_away(kind: str, data: bytes, status: int, headers: Headers) -> Case:
    """A call that must get an HTTP status, because it is not a gRPC call."""
    return Case(kind, data, partial(_http_complaint, status), headers)


def message_complaint(given: Due, code: int | None, text: str, message: bytes | None) -> str:
    """The fault of an answer to a ModelInferRequest; "" if it is right.

    Args:
        given: the allowed answers.
        code: gRPC status received.
        text: text of the error.
        message: serialized ModelInferResponse; None if none came.
    """
    if code not in given.codes:
        return f"status {code} ({text[:200]}), expected {_listed(given.codes)}"
    if code != 0:
        return "" if text else f"status {code} without a text"
    return "no answer beside status 0" if message is None else _response_complaint(given, message)


def _unary_complaint(given: Due, answer: Answer) -> str:
    try:
        messages = messages_in(answer.body)
    except ValueError as error:
        return str(error)
    if len(messages) > 1 or answer.reset is not None:
        return f"{len(messages)} messages, reset {answer.reset}"
    return message_complaint(given, answer.code, answer.text, messages[0] if messages else None)


def _code_complaint(codes: frozenset[int], answer: Answer) -> str:
    if answer.code in codes:
        return "" if answer.code == 0 or answer.text else f"status {answer.code} without a text"
    return f"status {answer.code} (HTTP {answer.http}, reset {answer.reset}, {answer.text[:200]}), expected {_listed(codes)}"


def _http_complaint(status: int, answer: Answer) -> str:
    return "" if answer.http == status else f"HTTP {answer.http}, gRPC {answer.code}, expected HTTP {status}"


def _response_complaint(given: Due, message: bytes) -> str:
    try:
        response = ModelInferResponse.FromString(message)
    except DecodeError:
        return "the answer is no ModelInferResponse"
    if response.id != given.id:
        return f"the answer has id {response.id!r}, expected {given.id!r}"
    if given.outputs is None:
        return ""
    if [output.name for output in response.outputs] != list(given.outputs):
        return f"outputs {[output.name for output in response.outputs]}, expected {list(given.outputs)}"
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        expected = given.outputs[output.name]
        if tuple(output.shape) != expected.shape or not is_same(raw, output.datatype, expected):
            return f"output {output.name!r} of shape {list(output.shape)} has other values than expected"
    return ""


def _listed(codes: frozenset[int]) -> str:
    return " or ".join(map(str, sorted(codes)))


LISTED = 3  # complaints that are kept for each kind


@dataclass
class Counts:
    right: Counter[str] = field(default_factory=Counter)  # messages with the right answer, by kind
    wrong: Counter[str] = field(default_factory=Counter)  # messages with a wrong answer, by kind
    statuses: Counter[str] = field(default_factory=Counter)  # calls by final status: gRPC's number, or HTTP's if there was none
    complaints: list[str] = field(default_factory=list)  # descriptions of the first few faults of each kind
    _listed: Counter[str] = field(default_factory=Counter)

    def take(self, kind: str, complaint: str, messages: int = 1) -> None:
        if not complaint:
            self.right[kind] += messages
            return
        self.wrong[kind] += messages
        self._listed[kind] += 1
        if self._listed[kind] <= LISTED:
            self.complaints.append(f"{kind}: {complaint}")

    @property
    def total(self) -> int:
        return self.right.total() + self.wrong.total()

    def by_kind(self) -> dict[str, list[int]]:
        """[right, wrong] of each kind."""
        return {kind: [self.right[kind], self.wrong[kind]] for kind in sorted(self.right.keys() | self.wrong.keys())}
