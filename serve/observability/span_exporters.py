"""Where spans go: to a collector, or into files. Used on the tracing thread; OpenTelemetry is imported there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from serve.observability.line_file import LineFile
from serve.observability.otlp_json import to_line
from serve.observability.spans import Span, spans_of, whole_batches
from serve.observability.tracer import TraceRecord

OTLP = "otlp"
CHUNK = 64  # traces that are exported at a time: some hundred KB


class Exporter(Protocol):
    """Takes records of traced requests; its methods are called on one thread."""

    def prepare(self) -> None:
        """Import OpenTelemetry, which takes some 100 ms: now, and not when there are requests to answer.

        Raises:
            ImportError: it is not there.
        """

    def deliver(self, records: list[TraceRecord]) -> None:
        """Send them.

        Raises:
            Exception: they are lost; the text says why.
        """

    def close(self) -> None:
        """Let go of files and connections."""


def make_exporter(to: str, log_frequency: Callable[[], int]) -> Exporter:
    """An exporter to a collector (OTLP) or to a file.

    Args:
        to: "otlp" or a path.
        log_frequency: traces per file, asked for each time.
    """
    return OtlpExporter() if to == OTLP else FileExporter(Path(to), log_frequency)


class OtlpExporter:
    """To the collector that the OTEL_EXPORTER_OTLP_* variables name, over gRPC."""

    def __init__(self) -> None:
        self._parts: tuple[Any, Any] | None = None

    def prepare(self) -> None:
        """As `Exporter.prepare`."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415  (slow, and seldom needed)
            OTLPSpanExporter,
        )

        from serve.observability.sdk_spans import resource, to_sdk  # noqa: PLC0415  (see above)

        if self._parts is None:
            self._parts = OTLPSpanExporter(), partial(to_sdk, of=resource())

    def deliver(self, records: list[TraceRecord]) -> None:
        """Send spans and wait until they are taken.

        Raises:
            ConnectionError: they were not, in the time that OTEL_EXPORTER_OTLP_TIMEOUT gives.
        """
        from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: PLC0415  (as in `prepare`)

        self.prepare()
        assert self._parts is not None  # noqa: S101  (for the type checker)
        exporter, to_sdk = self._parts
        rest = records
        while rest:
            end = whole_batches(rest, CHUNK)
            part, rest = rest[:end], rest[end:]
            if exporter.export(to_sdk(spans_of(part))) is not SpanExportResult.SUCCESS:
                raise ConnectionError("the collector did not take them; check OTEL_EXPORTER_OTLP_ENDPOINT")

    def close(self) -> None:
        """Close the connection."""
        if self._parts is not None:
            self._parts[0].shutdown()


class FileExporter:
    """Into files, each line an OTLP ExportTraceServiceRequest as JSON: what a collector's otlpjsonfile receiver reads.

    https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/
    """

    def __init__(self, path: Path, log_frequency: Callable[[], int]) -> None:
        self._path = path
        self._log_frequency = log_frequency
        self._file = LineFile(path)
        self._number = self._traces = 0
        self._to_line: Callable[[list[Span]], str] | None = None

    def prepare(self) -> None:
        """As `Exporter.prepare`."""
        from serve.observability.sdk_spans import SCOPE, resource  # noqa: PLC0415  (see above)

        if self._to_line is None:
            self._to_line = partial(to_line, resource=resource().attributes, scope=SCOPE)

    def deliver(self, records: list[TraceRecord]) -> None:
        """Append lines; a new file is begun when `log_frequency` traces are in one: FILE.0, FILE.1, ...

        Raises:
            OSError: they cannot be written.
        """
        self.prepare()
        assert self._to_line is not None  # noqa: S101  (for the type checker)
        rest = records
        while rest:
            end = whole_batches(rest, self._room())
            part, rest = rest[:end], rest[end:]
            self._file.write([self._to_line(spans_of(part))])
            self._traces += len(part)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _room(self) -> int:
        """Traces that should be written now; begins the next file where this one is full."""
        each = self._log_frequency()
        if not each:
            return CHUNK
        if self._number and self._traces < each:
            return min(CHUNK, each - self._traces)
        self._file.close()
        self._file = LineFile(self._path.with_name(f"{self._path.name}.{self._number}"))
        self._number += 1
        self._traces = 0
        return min(CHUNK, each)
