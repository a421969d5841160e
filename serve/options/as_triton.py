"""Options with Triton's names and values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from halfserve.option_groups import reading
from halfserve.serve.engine.model_statistics import LatencyFigures
from halfserve.serve.observability.metrics import latency_figures
from halfserve.serve.protocol.forwarded_headers import ForwardedHeaders, HeaderPattern
from halfserve.serve.protocol.rpc import SERVER_NAME, Api
from halfserve.serve.security.restricted_apis import GRPC_PREFIX, restricted_group
from halfserve.serve.security.security_options import RestrictedGroup

_as_triton = partial(typer.Option, rich_help_panel="As in Triton")


@dataclass(frozen=True, kw_only=True)
class AsTriton:
    """Options of forwarded headers, latency metrics, restricted APIs and errors, as tritonserver has them."""

    grpc_header_forward_pattern: Annotated[
        str | None,
        _as_triton(
            help="Regular expression: headers of gRPC calls with such names become parameters of their inference requests."
        ),
    ] = None
    http_header_forward_pattern: Annotated[
        str | None,
        _as_triton(help="Regular expression: HTTP headers with such names become parameters of their inference requests."),
    ] = None
    metrics_config: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel="Observing",
            help="NAME=VALUE: counter_latencies=false leaves counters of durations out, summary_latencies=true adds summaries "
            "with quantiles, summary_quantiles=0.5:0.05,0.99:0.001 sets these, histogram_latencies=true adds histograms of the "
            "time to the first response; may be repeated.",
        ),
    ] = None
    grpc_restricted_protocol: Annotated[
        list[str] | None,
        _as_triton(
            hide_input=True,
            help="APIS:KEY=VALUE, such as inference,metadata:key=secret: calls of these need the header "
            f"{GRPC_PREFIX}KEY with this value; may be repeated. APIs: {', '.join(Api)}.",
        ),
    ] = None
    http_restricted_api: Annotated[
        list[str] | None, _as_triton(hide_input=True, help="The same for HTTP requests, by the header KEY; may be repeated.")
    ] = None

    strict_readiness: Annotated[
        bool,
        _as_triton(
            "--strict-readiness",
            help="Report the server as ready only while each model that was not unloaded is ready; without it, models "
            "that are refused do not count.",
        ),
    ] = False
    server_name: Annotated[str, _as_triton(help="Name of the server in its metadata; Triton's is triton.")] = SERVER_NAME
    triton_errors: Annotated[
        bool,
        _as_triton(
            "--triton-errors",
            help="Begin errors that clients of Triton compare with Triton's texts, and give them its statuses: a full queue is "
            "UNAVAILABLE (503), for example.",
        ),
    ] = False

    def forwarded(self) -> ForwardedHeaders:
        """Headers that become parameters of inference requests."""
        return ForwardedHeaders(
            grpc=_pattern("--grpc-header-forward-pattern", self.grpc_header_forward_pattern),
            http=_pattern("--http-header-forward-pattern", self.http_header_forward_pattern),
        )

    def latencies(self) -> LatencyFigures:
        """Metrics of latencies."""
        with reading("--metrics-config"):
            return latency_figures(self.metrics_config or ())

    def grpc_restricted(self) -> tuple[RestrictedGroup, ...]:
        """APIs of gRPC that require a header."""
        with reading("--grpc-restricted-protocol"):
            return tuple(restricted_group(text, GRPC_PREFIX) for text in self.grpc_restricted_protocol or ())

    def http_restricted(self) -> tuple[RestrictedGroup, ...]:
        """APIs of HTTP that require a header."""
        with reading("--http-restricted-api"):
            return tuple(restricted_group(text, "") for text in self.http_restricted_api or ())


def _pattern(option: str, text: str | None) -> HeaderPattern | None:
    with reading(option):
        return HeaderPattern(text) if text else None
