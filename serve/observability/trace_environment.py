"""What OpenTelemetry's standard environment variables say.

https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from serve.engine.errors import FailedPreconditionError
from serve.observability.options import ObserveOptions
from serve.observability.span_exporters import OTLP
from serve.observability.trace_settings import TraceSettings

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
OTLP_PACKAGE = "opentelemetry.exporter.otlp.proto.grpc"


def destination(options: ObserveOptions, environment: Mapping[str, str]) -> str:
    """Where traces go, should there be any: OTLP, a path, or "" for nowhere."""
    named = any(environment.get(name) for name in ENDPOINTS) or environment.get("OTEL_TRACES_EXPORTER") == OTLP
    return options.trace_to or (OTLP if named else "")


def settings_at_start(options: ObserveOptions, environment: Mapping[str, str]) -> TraceSettings:
    """Off unless traces were asked for, by option or by OTEL_TRACES_EXPORTER=otlp."""
    asked = bool(options.trace_to) or environment.get("OTEL_TRACES_EXPORTER") == OTLP
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        asked = False
    rate = sampler_rate(environment) if asked else None
    return TraceSettings(
        level="TIMESTAMPS" if asked and rate != 0 else "OFF",
        rate=rate or options.trace_rate,
        count=options.trace_count,
        log_frequency=options.trace_log_frequency,
    )


def sampler_rate(environment: Mapping[str, str]) -> int | None:
    """One request in so many, as OTEL_TRACES_SAMPLER says; 0 for none, None where it says nothing we know.

    A caller's own decision is followed under each of them: a trace with holes helps nobody.
    """
    name = environment.get("OTEL_TRACES_SAMPLER", "").removeprefix("parentbased_")
    if name in {"always_on", "always_off"}:
        return int(name == "always_on")
    if name != "traceidratio":
        return None
    try:
        share = float(environment.get("OTEL_TRACES_SAMPLER_ARG", "1"))
    except ValueError:
        return 1
    return max(1, round(1 / share)) if share > 0 else 0


def check_can_trace(to: str) -> None:
    """Whether traces could be made and would have somewhere to go.

    Raises:
        FailedPreconditionError: not so; the text says what to do.
    """
    if not to:
        raise FailedPreconditionError(
            "traces have nowhere to go; start the server with --trace-to FILE or --trace-to otlp, "
            "or with OTEL_EXPORTER_OTLP_ENDPOINT set"
        )
    for package in ("opentelemetry.sdk.trace", *([OTLP_PACKAGE] if to == OTLP else [])):
        try:
            found = find_spec(package) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise FailedPreconditionError("traces need OpenTelemetry; install it with: pip install 'halfserve[trace]'")
