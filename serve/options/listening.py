"""Options of the addresses and protocols that a server listens with, and of the messages that it takes."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from halfserve.option_groups import reading
from halfserve.serve.http.http_options import MIB, HttpLimits, HttpOptions, checked_origin
from halfserve.serve.protocol.shared_memory_regions import SharedMemoryMode
from halfserve.serve.server import ServerOptions
from halfserve.serve.transports.transport import TransportName

HTTP_PORT, METRICS_PORT = HttpOptions.port, HttpOptions.metrics_port
MAX_TEXT_MIB = 32  # the texts of one request have at most 8 Mi characters, of up to 4 bytes each

_listening = partial(typer.Option, rich_help_panel="Listening")
_as_triton = partial(typer.Option, rich_help_panel="As in Triton")


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Options of ports, HTTP and the gRPC transport."""

    host: Annotated[str, _listening(help="Address to listen on; 0.0.0.0 for all.")] = ServerOptions.host
    grpc_port: Annotated[int, _listening(min=0, max=65535, help="gRPC port; 0 finds a free one.")] = ServerOptions.grpc_port
    grpc: Annotated[bool, _as_triton("--grpc/--no-grpc", help="Serve gRPC.")] = ServerOptions.grpc
    http: Annotated[bool, _listening("--http/--no-http", help="Serve REST, the page and metrics too.")] = True
    http_port: Annotated[
        int | None,
        _listening(
            min=-1,
            max=65535,
            help=f"Port of REST and the page, {HTTP_PORT} by default; 0 finds a free one, as --grpc-port 0 does, -1 has none.",
            show_default=False,
        ),
    ] = None
    reuse_ports: Annotated[
        bool,
        _as_triton(
            "--reuse-ports",
            help="Share the ports of gRPC and HTTP with other servers that have this option too; not on Windows.",
        ),
    ] = ServerOptions.reuse_ports
    metrics_port: Annotated[
        int | None,
        _listening(
            min=-1,
            max=65535,
            help=f"Port of the metrics alone, {METRICS_PORT} by default; 0 finds a free one, -1 has none.",
            show_default=False,
        ),
    ] = None
    http_allowed_host: Annotated[
        list[str] | None, _listening(help="A name by which browsers may address this server; may be repeated.")
    ] = None
    http_allowed_origin: Annotated[
        list[str] | None,
        _listening(
            help="An origin such as https://app.example whose pages may send inference requests, or '*'; may be repeated."
        ),
    ] = None
    http_max_input_size: Annotated[
        int,
        _as_triton(min=1, help="Bytes of one HTTP request, as sent.", show_default=f"{HttpLimits.max_body_bytes // MIB} MiB"),
    ] = HttpLimits.max_body_bytes
    max_text_mib: Annotated[
        int,
        _listening(
            min=1,
            max=MAX_TEXT_MIB,
            help="MiB of one request to the text endpoints, such as /v1/embeddings, as sent and decompressed.",
        ),
    ] = HttpLimits.max_text_body_bytes // MIB
    transport: Annotated[
        TransportName, _listening(help="Implementation of gRPC: nghttp2 (fast) or grpcio (the reference).")
    ] = ServerOptions.transport
    shared_memory: Annotated[
        bool,
        _listening(
            "--shared-memory",
            help="Let clients on this machine leave tensors in shared memory (the system's, or a CUDA device's).",
        ),
    ] = ServerOptions.shared_memory
    shared_memory_mode: Annotated[
        SharedMemoryMode,
        _listening(
            help="Access to system shared memory. safe: the server copies inputs and outputs, so that no client can harm it. "
            "trusted: the server maps the clients' files and computes on them without a copy; a client that truncates its "
            "registered file ends the server (SIGBUS)."
        ),
    ] = ServerOptions.shared_memory_mode
    max_buffered_mib: Annotated[
        int | None,
        _listening(
            min=4,
            help="MiB of unanswered requests and unread answers, over all clients. By default 256, or a sixteenth of the "
            "memory that the process may use if that is less.",
            show_default=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.shared_memory_mode is SharedMemoryMode.TRUSTED and not self.shared_memory:
            raise typer.BadParameter("--shared-memory-mode trusted needs --shared-memory; add it or leave the mode out")
        if self.reuse_ports and (self.transport is TransportName.GRPCIO or not hasattr(socket, "SO_REUSEPORT")):
            raise typer.BadParameter("--reuse-ports needs --transport nghttp2, and a system that can share ports; leave it out")
        if not self.grpc and (not self.http or self.http_port == -1):
            raise typer.BadParameter("--no-grpc without a port for REST leaves nothing to serve; leave it out")
        for option, is_given in (
            ("--http-port", self.http_port is not None and self.http_port >= 0),
            ("--metrics-port", self.metrics_port is not None and self.metrics_port >= 0),
            ("--http-allowed-host", bool(self.http_allowed_host)),
            ("--http-allowed-origin", bool(self.http_allowed_origin)),
        ):
            if is_given and not self.http:
                raise typer.BadParameter(
                    f"{option} means nothing with --no-http, which has no metrics either; leave one of them out"
                )

    def http_options(self) -> HttpOptions | None:
        """Ports and limits of HTTP; None with --no-http."""
        if not self.http:
            return None
        # --grpc-port 0 is for several servers on one machine, so that the other ports are free ones as well.
        usual_http, usual_metrics = (0, 0) if self.grpc_port == 0 else (HTTP_PORT, METRICS_PORT)
        metrics = usual_metrics if self.metrics_port is None else self.metrics_port
        with reading("--http-allowed-origin"):
            origins = tuple(map(checked_origin, self.http_allowed_origin or ()))
        return HttpOptions(
            port=usual_http if self.http_port is None else self.http_port if self.http_port >= 0 else None,
            metrics_port=None if metrics is None or metrics < 0 else metrics,
            allowed_hosts=tuple(self.http_allowed_host or ()),
            allowed_origins=origins,
            limits=HttpLimits(max_body_bytes=self.http_max_input_size, max_text_body_bytes=self.max_text_mib * MIB),
        )
