"""One line of JSON per request, without the contents of any tensor.

Lines are put together by hand: on the event loop, where a formatting thread would take the interpreter away from requests for
milliseconds at a time, and at a fourth of the time that json.dumps takes. Some dozens are made together, which costs less than
one by one: this code has left the processor's caches by the time that the next answer is logged. A thread writes them.
"""

from __future__ import annotations

import time
from json.encoder import encode_basestring_ascii as quoted
from typing import NamedTuple

from serve.engine.model import Model
from serve.engine.model_statistics import BatchTimes
from serve.observability.exchange import MAX_TEXT, Caller, Exchange, told
from serve.observability.outbox import Outbox
from serve.observability.trace_context import TraceContext

TOGETHER = 64  # answers; making their lines takes some 100 us
THOUSANDTHS = tuple(f".{number:03d}" for number in range(1000))  # Python takes longer to format a float than all the rest takes


class Answer(NamedTuple):
    """What a line tells; times in nanoseconds.

    Attributes:
        model: asked.
        request_id: as sent, its first MAX_TEXT bytes.
        caller: of its call.
        rows: of its batch dimension.
        batch_rows: of all that were computed with it.
        request_bytes: of its message.
        response_bytes: of the answer.
        arrived: on time.monotonic_ns()'s clock, as the others.
        batch: when its batch passed each stage.
        ended: when the answer was handed over.
        trace: of which it is part.
    """

    model: Model
    request_id: bytes
    caller: Caller
    rows: int
    batch_rows: int
    request_bytes: int
    response_bytes: int
    arrived: int
    batch: BatchTimes
    ended: int
    trace: TraceContext | None


class AccessLogger:
    """Makes the lines."""

    def __init__(self, outbox: Outbox[str]) -> None:
        self._outbox = outbox
        outbox.fill = self._write
        self._answers: list[Answer] = []  # that have no line yet
        self._second = self._millisecond = -1
        self._stamp = self._time = ""
        self._model: Model | None = None  # of the latest line, and its part of that
        self._model_text = ""

    def answered(self, exchange: Exchange, response_bytes: int, ended_ns: int) -> None:
        """A request got its answer, on time.monotonic_ns()'s clock at `ended_ns`."""
        model = exchange.model
        times = None if model is None else model.statistics.latest
        if model is None or times is None:
            return
        answers = self._answers
        answers.append(
            Answer(
                model,
                exchange.request_id[:MAX_TEXT],
                exchange.caller,
                exchange.rows,
                model.statistics.latest_rows,
                exchange.request_bytes,
                response_bytes,
                exchange.arrived_ns,
                times,
                ended_ns,
                exchange.trace,
            )
        )
        if len(answers) == TOGETHER:
            self._write()
        elif len(answers) == 1:
            self._outbox.expect()

    def failed(
        self,
        caller: Caller,
        asked: tuple[str, str, str],
        request_bytes: int,
        status: str,
        error: Exception | None,
        spent_ns: int,
    ) -> None:
        """A request got an error.

        Args:
            caller: of its call.
            asked: model, version and id, as far as they could be read.
            request_bytes: of its message.
            status: the wire's word.
            error: None: its client has gone.
            spent_ns: since its arrival; 0 where it did not get as far as its model.
        """
        self._write()  # in their order
        name, version, request_id = asked
        text, parent = told(error), caller.parent
        total = f',"total_ms":{_ms(spent_ns // 1000)}' if spent_ns else ""
        trace = f',"trace_id":"{parent.trace_id:032x}"' if parent is not None and parent.sampled else ""
        at = self._at(time.time_ns())
        reason = f',"error":{quoted(text)}' if text else ""
        self._outbox.put(
            f'{{"time":"{at}","id":{_request_id(request_id.encode(), caller)},"model":{quoted(name[:MAX_TEXT])},'
            f'"version":{quoted(version[:MAX_TEXT])},"status":"{status}","request_bytes":{request_bytes}{total},'
            f'"client":{quoted(caller.peer)}{trace}{reason}}}\n'
        )

    def _write(self) -> None:
        """Make the lines of the answers that have none."""
        answers, self._answers = self._answers, []
        epoch_ns = time.time_ns() - time.monotonic_ns()
        for answer in answers:
            self._outbox.put(self._line(answer, epoch_ns))

    def _line(self, answer: Answer, epoch_ns: int) -> str:
        model, batch, caller = answer.model, answer.batch, answer.caller
        if model is not self._model:
            self._model, self._model_text = model, f'"model":{quoted(model.name)},"version":"{model.version}"'
        queue = _ms((batch.started - answer.arrived) // 1000)
        compute = _ms((batch.split - batch.started) // 1000)
        total = _ms((answer.ended - answer.arrived) // 1000)
        trace = "" if answer.trace is None else f',"trace_id":"{answer.trace.trace_id:032x}"'
        return (
            f'{{"time":"{self._at(epoch_ns + answer.ended)}","id":{_request_id(answer.request_id, caller)},{self._model_text},'
            f'"status":"OK","rows":{answer.rows},"batch_rows":{answer.batch_rows},'
            f'"request_bytes":{answer.request_bytes},"response_bytes":{answer.response_bytes},'
            f'"queue_ms":{queue},"compute_ms":{compute},"total_ms":{total},"client":{quoted(caller.peer)}{trace}}}\n'
        )

    def _at(self, time_ns: int) -> str:
        """A time, as in 2026-02-01T12:00:00.250Z; made anew once in a millisecond, and most of it once in a second."""
        millisecond = time_ns // 1_000_000
        if millisecond != self._millisecond:
            self._millisecond = millisecond
            second, rest = divmod(millisecond, 1000)
            if second != self._second:
                self._second = second
                self._stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._time = f"{self._stamp}{THOUSANDTHS[rest]}Z"
        return self._time


def _ms(microseconds: int) -> str:
    """Microseconds, of which there are 0 or more, as milliseconds."""
    return f"{microseconds // 1000}{THOUSANDTHS[microseconds % 1000]}"


def _request_id(request_id: bytes, caller: Caller) -> str:
    """The request's own id, or that of its call: what a proxy in front has logged."""
    shown = request_id or caller.headers.get(b"x-request-id", b"")
    return quoted(shown[:MAX_TEXT].decode("utf-8", "replace")) if shown else '""'
