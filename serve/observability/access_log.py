"""One line of JSON per request, without the contents of any tensor.

Lines are put together by hand: on the event loop, where a formatting thread would take the interpreter away from requests for
milliseconds at a time, and at a fourth of the time that json.dumps takes. A thread writes them.
"""

from __future__ import annotations

import time
from json.encoder import encode_basestring_ascii as quoted

from serve.engine.model import Model
from serve.observability.exchange import Caller, Exchange, told
from serve.observability.outbox import Outbox

MAX_TEXT = 256  # characters of what clients choose
THOUSANDTHS = tuple(f".{number:03d}" for number in range(1000))  # Python takes longer to format a float than all the rest takes


class AccessLogger:
    """Makes the lines."""

    def __init__(self, outbox: Outbox[str]) -> None:
        self._outbox = outbox
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
        if model is not self._model:
            self._model, self._model_text = model, f'"model":{quoted(model.name)},"version":"{model.version}"'
        arrived_ns, caller = exchange.arrived_ns, exchange.caller
        queue = _ms((times.started - arrived_ns) // 1000)
        compute = _ms((times.split - times.started) // 1000)
        total = _ms((ended_ns - arrived_ns) // 1000)
        trace = "" if exchange.trace is None else f',"trace_id":"{exchange.trace.trace_id:032x}"'
        self._outbox.put(
            f'{{"time":"{self._now()}","id":{_request_id(exchange.request_id, caller)},{self._model_text},"status":"OK",'
            f'"rows":{exchange.rows},"batch_rows":{model.statistics.latest_rows},'
            f'"request_bytes":{exchange.request_bytes},"response_bytes":{response_bytes},'
            f'"queue_ms":{queue},"compute_ms":{compute},"total_ms":{total},"client":{quoted(caller.peer)}{trace}}}\n'
        )

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
        name, version, request_id = asked
        text, parent = told(error), caller.parent
        total = f',"total_ms":{_ms(spent_ns // 1000)}' if spent_ns else ""
        trace = f',"trace_id":"{parent.trace_id:032x}"' if parent is not None and parent.sampled else ""
        reason = f',"error":{quoted(text)}' if text else ""
        self._outbox.put(
            f'{{"time":"{self._now()}","id":{_request_id(request_id.encode(), caller)},"model":{quoted(name[:MAX_TEXT])},'
            f'"version":{quoted(version[:MAX_TEXT])},"status":"{status}","request_bytes":{request_bytes}{total},'
            f'"client":{quoted(caller.peer)}{trace}{reason}}}\n'
        )

    def _now(self) -> str:
        """The time, as in 2026-02-01T12:00:00.250Z; made anew once in a millisecond, and most of it once in a second."""
        millisecond = time.time_ns() // 1_000_000
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
