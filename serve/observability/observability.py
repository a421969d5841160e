"""Everything that observes a server, and its switches. What is off is not there: requests see `observer` as None."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from serve.engine.inference_core import InferenceCore
from serve.observability.access_log import AccessLogger
from serve.observability.line_file import LineFile, check_writable
from serve.observability.log_settings import LogFilter, LogSettings, Value
from serve.observability.observer import Observer, StatusName
from serve.observability.options import AccessLog, ObserveOptions
from serve.observability.outbox import Outbox
from serve.observability.span_exporters import OTLP, Exporter, make_exporter
from serve.observability.trace_environment import check_can_trace, destination, settings_at_start
from serve.observability.trace_settings import TraceControl
from serve.observability.tracer import Tracer, TraceRecord

CLOSE_S = 2.0  # for the last lines and traces to leave
MAX_TRACES_WAITING = 8192
TRACES_EVERY_S = 5.0  # as OpenTelemetry's own; waking up for some costs more than making them


class Observability:
    """Lives on the event loop.

    Attributes:
        observer: to be told of every request; None while nobody listens.
        logs: what is logged now.
        traces: what is traced.
        trace_to: where traces go, should there be any.
    """

    def __init__(self, options: ObserveOptions, core: InferenceCore, status_name: StatusName) -> None:
        """Start what the options ask for.

        Args:
            options: what to observe from the start.
            core: the models, and where to tell of what was dropped.
            status_name: the wire's word for an error.

        Raises:
            FailedPreconditionError: a file cannot be written, or traces cannot be made.
        """
        self._options = options
        self._figures = core.figures
        self.logs = LogSettings(access_log=options.access_log, access_log_every=options.access_log_every)
        self.trace_to = destination(options, os.environ)
        self.traces = TraceControl(settings_at_start(options, os.environ))
        self.observer: Observer | None = None
        self._observer = Observer(core, status_name)
        self._filter = LogFilter(self.logs)
        self._log: AccessLogger | None = None
        self._tracer: Tracer | None = None
        self._outboxes: list[Outbox[str] | Outbox[TraceRecord]] = []
        self._ends: list[LineFile | Exporter] = []
        self._check()
        self._follow()

    def update_logs(self, changes: Mapping[str, Value]) -> None:
        """Change what is logged.

        Raises:
            InvalidArgumentError: no such setting, or not such a value. Nothing has been changed then.
        """
        before, self.logs = self.logs, self.logs.changed(changes)
        if self.logs != before:
            self._filter.apply(self.logs, logging.getLogger())
            self._follow()

    def update_traces(self, model: str, changes: Mapping[str, Sequence[str]]) -> None:
        """Change what is traced, of a model or ("") of all that have no settings of their own.

        Raises:
            InvalidArgumentError: no such setting, or not such a value. Nothing has been changed then.
            FailedPreconditionError: traces have nowhere to go.
        """
        if "TIMESTAMPS" in changes.get("trace_level", ()):
            check_can_trace(self.trace_to)
        self.traces.update(model, changes)
        self._follow()

    def close(self) -> None:
        """Write what is still to be written, for CLOSE_S at most, and let go of everything."""
        self.observer = None
        for outbox in self._outboxes:
            outbox.close(CLOSE_S)
        for end in self._ends:
            end.close()
        self._filter.undo(logging.getLogger())

    def _check(self) -> None:
        """Whether what the options ask for can be had."""
        if self._options.access_log_file is not None:
            check_writable(self._options.access_log_file, "the access log")
        if self.trace_to not in {"", OTLP}:
            check_writable(Path(self.trace_to), "traces")
        if self.traces.is_on:
            check_can_trace(self.trace_to)

    def _follow(self) -> None:
        """Start what is asked for by now, and tell requests whether somebody listens."""
        if self.logs.access_log is not AccessLog.OFF and self._log is None:
            self._log = self._start_log()
        if self.traces.is_on and self._tracer is None:
            self._tracer = self._start_tracer()
        log = self._log if self.logs.access_log is not AccessLog.OFF else None
        every = {AccessLog.ALL: 1, AccessLog.SAMPLED: self.logs.access_log_every}.get(self.logs.access_log, 0)
        tracer = self._tracer if self.traces.is_on else None
        self._observer.listen(log, every, tracer, 0 if tracer is None else tracer.every)
        self.observer = self._observer if log or tracer else None

    def _start_log(self) -> AccessLogger:
        file = LineFile(self._options.access_log_file)
        outbox: Outbox[str] = Outbox(file.write, name="access log")
        self._outboxes.append(outbox)
        self._ends.append(file)
        self._figures.readings["access_log_dropped"] = lambda: outbox.dropped
        return AccessLogger(outbox)

    def _start_tracer(self) -> Tracer:
        exporter = make_exporter(self.trace_to, lambda: self.traces.everywhere.settings.log_frequency)
        outbox: Outbox[TraceRecord] = Outbox(
            exporter.deliver, name="traces", bound=MAX_TRACES_WAITING, every_s=TRACES_EVERY_S, prepare=exporter.prepare
        )
        tracer = Tracer(self.traces, outbox)
        self._outboxes.append(outbox)
        self._ends.append(exporter)
        self._figures.readings["traces"] = lambda: tracer.traced
        self._figures.readings["traces_dropped"] = lambda: outbox.dropped
        return tracer
