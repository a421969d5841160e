"""The access log: one line of JSON per request, without the contents of any tensor.

Lines are formatted by hand, in a fourth of the time of json.dumps, and on the event loop: a formatting thread would hold the
interpreter lock for milliseconds at a time. Some dozens are formatted together, while this code is in the processor's caches. A
thread writes them.
"""

from __future__ import annotations

import time
from json.encoder import encode_basestring_ascii as quoted

from halfserve.serve.engine.model import Model
from halfserve.serve.observability.inference_record import MAX_TEXT, Caller, InferenceRecord, loggable
from halfserve.serve.observability.outbox import Outbox

TOGETHER = 64  # number of answers whose lines are made together, in some 100 us
THOUSANDTHS = tuple(f".{number:03d}" for number in range(1000))  # cached, as formatting a float takes longer than all the rest


class AccessLogger:
    def __init__(self, outbox: Outbox[str], process: int | None = None) -> None:
        """Log the requests of one process; `process` is its number if several processes write the same log, else None."""
        self._outbox = outbox
        self._process = "" if process is None else f',"process":{process}'
        outbox.fill = self._write
        self._answers: list[InferenceRecord] = []  # answers without a line yet
        self._second = self._millisecond = -1
        self._stamp = self._time = ""
        self._model: Model | None = None  # model of the latest line, whose part of the line is cached
        self._model_text = ""

    def answered(self, record: InferenceRecord) -> None:
        """Log an answer that has been handed over."""
        if record.batch is None:
            return
        answers = self._answers
        answers.append(record)
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
        """Log a request that failed.

        `asked` has the model, the version and the id, as far as they could be read. `status` names the gRPC status. `error` is
        None if the client has disconnected. `spent_ns` counts from the request's arrival; it is 0 if the request did not reach
        its model.
        """
        self._write()  # keeps the order of the lines
        name, version, request_id = asked
        text, parent = loggable(error), caller.parent
        shown_id = _request_id(request_id.encode(), caller)
        total = f',"total_ms":{_ms(spent_ns // 1000)}' if spent_ns else ""
        trace = "" if parent is None else f',"trace_id":"{parent.trace_id:032x}"'
        at = self._at(time.time_ns())
        reason = f',"error":{quoted(text)}' if text else ""
        level = "ERROR" if status == "INTERNAL" else "WARNING"
        self._outbox.put(
            f'{{"time":"{at}","level":"{level}","id":{shown_id},"model":{quoted(name[:MAX_TEXT])},'
            f'"version":{quoted(version[:MAX_TEXT])},"status":"{status}","request_bytes":{request_bytes}{total},'
            f'"client":{quoted(caller.peer)}{self._process}{_token(caller)}{trace}{reason}}}\n'
        )

    def _write(self) -> None:
        answers, self._answers = self._answers, []
        epoch_ns = time.time_ns() - time.monotonic_ns()
        for answer in answers:
            self._outbox.put(self._line(answer, epoch_ns))

    def _line(self, record: InferenceRecord, epoch_ns: int) -> str:
        model, caller, arrived_ns, batch, ended_ns = (
            record.model,
            record.caller,
            record.arrived_ns,
            record.batch,
            record.ended_ns,
        )
        if model is not self._model:
            self._model, self._model_text = model, _computed_by(model)
        started, split = (arrived_ns, arrived_ns) if batch is None else (batch.started, batch.split)
        queue = _ms((started - arrived_ns) // 1000)
        compute = _ms((split - started) // 1000)
        total = _ms((ended_ns - arrived_ns) // 1000)
        context = record.trace or caller.parent  # callers log the trace id even if no trace is recorded
        trace = "" if context is None else f',"trace_id":"{context.trace_id:032x}"'
        return (
            f'{{"time":"{self._at(epoch_ns + ended_ns)}","level":"INFO","id":{_request_id(record.request_id, caller)},'
            f'{self._model_text},"status":"{record.status}","rows":{record.rows},"batch_rows":{record.batch_rows},'
            f'"request_bytes":{record.request_bytes},"response_bytes":{record.response_bytes},'
            f'"queue_ms":{queue},"compute_ms":{compute},"total_ms":{total},'
            f'"client":{quoted(caller.peer)}{self._process}{_token(caller)}{trace}}}\n'
        )

    def _at(self, time_ns: int) -> str:
        """Return a time such as 2026-02-01T12:00:00.250Z, which is formatted once per millisecond, and most of it once per
        second.
        """
        millisecond = time_ns // 1_000_000
        if millisecond != self._millisecond:
            self._millisecond = millisecond
            second, rest = divmod(millisecond, 1000)
            if second != self._second:
                self._second = second
                self._stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._time = f"{self._stamp}{THOUSANDTHS[rest]}Z"
        return self._time


def _computed_by(model: Model) -> str:
    name, provider, precision = map(quoted, (model.name, model.provider, model.precision))
    return f'"model":{name},"version":"{model.version}","provider":{provider},"precision":{precision}'


def _ms(microseconds: int) -> str:
    """Format non-negative microseconds as milliseconds."""
    return f"{microseconds // 1000}{THOUSANDTHS[microseconds % 1000]}"


def _token(caller: Caller) -> str:
    """Return the field with the name of the token's holder, which needs no quoting; "" without a token."""
    return f',"token":"{caller.token}"' if caller.token else ""


def _request_id(request_id: bytes, caller: Caller) -> str:
    """Return the request's own id, or the call's `x-request-id`, which a proxy logs too."""
    shown = request_id or caller.headers.get(b"x-request-id", b"")
    return quoted(shown[:MAX_TEXT].decode("utf-8", "replace")) if shown else '""'
