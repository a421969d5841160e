"""Access log and traces of one server, which can be switched while it runs, and its capture."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.observability.access_log import AccessLogger
from halfserve.serve.observability.capture import Capture
from halfserve.serve.observability.log_settings import LogFilter, LogSettings, Value
from halfserve.serve.observability.observe_options import OTLP, AccessLog, ObserveOptions, check_can_trace, destination, file_of
from halfserve.serve.observability.observer import Observer, StatusName
from halfserve.serve.observability.outbox import LineFile, Outbox, check_writable
from halfserve.serve.observability.span_export import FileExporter, OtlpExporter, make_exporter
from halfserve.serve.observability.trace_settings import TENSORS, TIMESTAMPS, TraceControl, settings_at_start
from halfserve.serve.observability.tracing import Tracer, TraceRecord

logger = logging.getLogger(__name__)

CLOSE_S = 2.0  # seconds that writing the last lines and traces may take
MAX_TRACES_WAITING = 8192
TRACES_EVERY_S = 5.0  # the interval of OpenTelemetry's own processor


class Observability:
    """Starts, switches and closes the access log, the traces and the capture of one server. Lives on the event loop.

    Attributes:
        observer: counts all requests, and logs and traces some.
        logs: the current log settings.
        traces: the current trace settings.
        trace_to: destination of traces: OTLP, a path, or "" for none.
    """

    def __init__(self, options: ObserveOptions, core: InferenceCore, status_name: StatusName) -> None:
        """Start the log and the traces that the options ask for; `status_name` names the gRPC status of an error.

        Raises:
            FailedPreconditionError: a file cannot be written, or OpenTelemetry is not installed.
        """
        self._options = options
        self._figures = core.figures
        self.logs = LogSettings(
            log_verbose_level=options.log_verbose, access_log=options.access_log, access_log_every=options.access_log_every
        )
        self.trace_to = destination(options, os.environ)
        self.traces = TraceControl(settings_at_start(options, os.environ))
        self.observer = Observer(core, status_name)
        self._filter = LogFilter(self.logs)
        self._log: AccessLogger | None = None
        self._tracer: Tracer | None = None
        self._outboxes: list[Outbox[str] | Outbox[TraceRecord]] = []
        self._ends: list[LineFile | OtlpExporter | FileExporter] = []
        self._capture: Capture | None = None
        self._check()
        self._capture = self._start_capture(core)
        if options.log_verbose:
            self._filter.apply(self.logs, logging.getLogger())
        self._follow()

    def update_logs(self, changes: Mapping[str, Value]) -> None:
        """Change the log settings.

        Raises:
            InvalidArgumentError: a name or a value is invalid; then nothing has changed.
        """
        before, self.logs = self.logs, self.logs.changed(changes)
        if self.logs != before:
            self._filter.apply(self.logs, logging.getLogger())
            self._follow()

    def update_traces(self, model: str, changes: Mapping[str, Sequence[str]]) -> None:
        """Change the trace settings of a model or, under "", of all models without settings of their own.

        Raises:
            InvalidArgumentError: a name or a value is invalid; then nothing has changed.
            FailedPreconditionError: traces have no destination.
        """
        levels = changes.get("trace_level", ())
        if TIMESTAMPS in levels:
            check_can_trace(self.trace_to)
        self.traces.update(model, changes)
        if TENSORS in levels:
            logger.warning("traces have no tensors: TENSORS in trace_level has no effect")
        self._follow()

    def close(self) -> None:
        """Write the remaining lines and traces, for at most CLOSE_S seconds, and close everything."""
        self.observer.listen(None, 0, None, 0)
        for outbox in self._outboxes:
            outbox.close(CLOSE_S)
        for end in self._ends:
            end.close()
        if self._capture is not None:
            self._capture.close()
            self._capture = None
        self._filter.undo(logging.getLogger())

    def _check(self) -> None:
        if self._options.access_log_file is not None:
            check_writable(self._options.access_log_file, "the access log")
        if self.trace_to not in {"", OTLP}:
            check_writable(Path(file_of(self.trace_to)), "traces")
        if self.traces.is_on:
            check_can_trace(self.trace_to)

    def _follow(self) -> None:
        """Apply the current settings."""
        if self.logs.access_log is not AccessLog.OFF and self._log is None:
            self._log = self._start_log()
        if self.traces.is_on and self._tracer is None:
            self._tracer = self._start_tracer()
        log = self._log if self.logs.access_log is not AccessLog.OFF else None
        every = {AccessLog.ALL: 1, AccessLog.SAMPLED: self.logs.access_log_every}.get(self.logs.access_log, 0)
        tracer = self._tracer if self.traces.is_on else None
        self.observer.listen(log, every, tracer, 0 if tracer is None else tracer.every, self._capture)

    def _start_capture(self, core: InferenceCore) -> Capture | None:
        options = self._options
        if options.capture is None:
            return None
        core.on_change(self._models_changed)
        return Capture(options.capture, options.capture_share, options.capture_max_mib << 20, core, options.process)

    def _models_changed(self) -> None:
        if self._capture is not None:
            self._capture.refresh()
            self._follow()

    def _start_log(self) -> AccessLogger:
        file = LineFile(self._options.access_log_file)
        outbox: Outbox[str] = Outbox(file.write, name="access log")
        self._outboxes.append(outbox)
        self._ends.append(file)
        self._figures.counter(
            "halfserve_access_log_dropped_total", "Lines that the log could not take in time", lambda: outbox.dropped
        )
        return AccessLogger(outbox, self._options.process)

    def _start_tracer(self) -> Tracer:
        exporter = make_exporter(
            self.trace_to, lambda: self.traces.everywhere.settings.log_frequency, process=self._options.process
        )
        outbox: Outbox[TraceRecord] = Outbox(
            exporter.deliver, name="traces", bound=MAX_TRACES_WAITING, every_s=TRACES_EVERY_S, prepare=exporter.prepare
        )
        tracer = Tracer(self.traces, outbox)
        self._outboxes.append(outbox)
        self._ends.append(exporter)
        self._figures.counter("halfserve_traces_total", "Requests that were traced", lambda: tracer.traced)
        self._figures.counter(
            "halfserve_traces_dropped_total", "Traces that the exporter could not take in time", lambda: outbox.dropped
        )
        return tracer
