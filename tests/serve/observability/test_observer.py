from __future__ import annotations

import asyncio
from math import gcd

from hypothesis import given
from hypothesis import strategies as st

from serve.engine.inference_core import InferenceCore
from serve.observability.access_log import AccessLogger
from serve.observability.exchange import Caller, Exchange
from serve.observability.observer import Observer
from serve.observability.outbox import Outbox
from serve.observability.trace_settings import TraceControl, TraceSettings
from serve.observability.tracer import Tracer, TraceRecord

periods = st.integers(0, 12)


async def chosen(log_every: int, trace_every: int, requests: int) -> tuple[list[int], list[int]]:
    """The numbers of the requests that are chosen for the log and for traces."""
    lines: Outbox[str] = Outbox(lambda _: None, name="lines")
    traces: Outbox[TraceRecord] = Outbox(lambda _: None, name="traces")
    log = AccessLogger(lines) if log_every else None
    tracer = Tracer(TraceControl(TraceSettings()), traces) if trace_every else None
    observer = Observer(InferenceCore([]), str)
    observer.listen(log, log_every, tracer, trace_every)
    logged, traced = [], []
    for number in range(1, requests + 1):
        observer.until -= 1
        if not observer.until:
            exchange = Exchange(observer, Caller("", {}))
            observer.choose(exchange)
            logged += [number] if exchange.is_logged else []
            traced += [number] if exchange.is_trace_due else []
    lines.close(1)
    traces.close(1)
    return logged, traced


@given(periods, periods)
def test_one_countdown_serves_two_periods(log_every: int, trace_every: int) -> None:
    requests = 3 * (log_every * trace_every // gcd(log_every, trace_every) if log_every and trace_every else 12)
    logged, traced = asyncio.run(chosen(log_every, trace_every, requests))
    assert logged == [n for n in range(1, requests + 1) if log_every and n % log_every == 0]
    assert traced == [n for n in range(1, requests + 1) if trace_every and n % trace_every == 0]
