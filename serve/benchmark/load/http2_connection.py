"""Connections to the server: a non-blocking socket with optional TLS, and HTTP/2 on it by libnghttp2.

Connections are driven by a loop of their own (serve/benchmark/load/driver.py) rather than by asyncio, whose timers are a
millisecond coarse: requests of an open loop have to leave on time.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from abc import ABC, abstractmethod
from typing import ClassVar

from ngh2 import Configuration, Connection, ConnectionClosed, Event, GoAwayReceived, Role, SettingsReceived
from ngh2.exceptions import NGH2Error

from halfserve.serve.benchmark.load.spec import LoadEndpoint, TlsPaths

ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 2, 3, 4, 5  # RFC 9113, section 6.5.2
STREAM_WINDOW_BYTES, CONNECTION_WINDOW_BYTES = 2**24, 2**30
FRAME_BYTES = 2**20
READ_BYTES = WRITE_BYTES = 2**18
CANCEL = 0x08
MAX_UNSENT_BYTES = 2**25  # limit on unsent data, as libnghttp2 copies it
CONNECT_TIMEOUT_S = 5.0
WOULD_BLOCK = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
DEFAULT_STREAMS = 2**31 - 1  # for a server that sets no limit


def encrypted(plain: socket.socket, host: str, files: TlsPaths, protocol: str) -> ssl.SSLSocket:
    """Do the TLS handshake with ALPN for a protocol on a connected socket with a timeout, which is closed if that fails.

    Raises OSError: the server's certificate is not trusted, a file cannot be read, or the server does not support TLS.
    """
    try:
        context = ssl.create_default_context(cafile=files.authorities)
        if files.certificate is not None:
            context.load_cert_chain(files.certificate, files.key)
        context.set_alpn_protocols([protocol])
        return context.wrap_socket(plain, server_hostname=files.server_name or host)
    except BaseException:
        plain.close()
        raise


class ConnectionLostError(Exception):
    """The connection was lost or could not be opened; the text gives the reason."""


class SocketConnection(ABC):
    """A socket to the server, with TLS where the target says so; non-blocking once the subclass has greeted the server.
    Raises ConnectionLostError: the server does not answer.
    """

    protocol: ClassVar[str]  # name of the protocol in ALPN

    def __init__(self, target: LoadEndpoint, timeout_s: float) -> None:
        self.usable = True  # whether it takes new calls
        self.unsent_bytes = 0  # unsent bytes of messages; calls add to it between two flushes
        self._unsent = memoryview(b"")
        try:
            plain = socket.create_connection((target.host, target.port), timeout=timeout_s)
            self._socket = plain if target.tls is None else encrypted(plain, target.host, target.tls, self.protocol)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise ConnectionLostError(_reason(error)) from None

    @property
    @abstractmethod
    def max_streams(self) -> int:
        """Calls that the server allows in flight on this connection."""

    @abstractmethod
    def cancel(self, stream: int) -> None:
        """Tell the server that the answer to a request is no longer awaited."""

    @abstractmethod
    def _more(self) -> bytes:
        """Return the next bytes to write; empty if there are none."""

    @abstractmethod
    def _held_back_bytes(self) -> int:
        """Bytes of messages that `_more` has not returned yet."""

    @property
    def wants_write(self) -> bool:
        """Whether data waits for space in the socket's buffer."""
        return bool(self._unsent)

    @property
    def is_behind(self) -> bool:
        """Whether so much data is unsent that another request would only cost memory."""
        return self.unsent_bytes > MAX_UNSENT_BYTES

    def fileno(self) -> int:
        return self._socket.fileno()

    def received(self) -> bytes | None:
        """Read received data; None if there is none. Raises ConnectionLostError: the server has closed the connection."""
        try:
            data = self._socket.recv(READ_BYTES)
        except WOULD_BLOCK:
            return None
        except OSError as error:
            raise ConnectionLostError(_reason(error)) from None
        if not data:
            raise ConnectionLostError("the server closed the connection")
        return data

    def flush(self) -> None:
        """Write as much as the socket takes. Raises ConnectionLostError: the connection is lost."""
        try:
            while self._unsent or self._take_more():
                sent = self._socket.send(self._unsent)
                self._unsent = self._unsent[sent:]
            self.unsent_bytes = self._held_back_bytes()
        except WOULD_BLOCK:
            self.unsent_bytes = self._held_back_bytes()
        except (OSError, NGH2Error) as error:
            raise ConnectionLostError(_reason(error)) from None

    def close(self) -> None:
        self.usable = False
        self._socket.close()

    def _take_more(self) -> bool:
        self._unsent = memoryview(self._more())
        return bool(self._unsent)


class Http2Connection(SocketConnection):
    """A connection after the HTTP/2 handshake; `timeout_s` limits connecting and waiting for the server's settings.
    Raises ConnectionLostError: the server does not answer, or does not speak HTTP/2.
    """

    protocol = "h2"

    def __init__(self, target: LoadEndpoint, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self.http2 = Connection(Role.CLIENT, Configuration(peer_max_concurrent_streams=DEFAULT_STREAMS))
        super().__init__(target, timeout_s)
        try:
            self._greet(time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def max_streams(self) -> int:
        """Calls that the server allows in flight on this connection."""
        return self.http2.remote_settings.get(MAX_CONCURRENT_STREAMS, DEFAULT_STREAMS)

    def receive(self) -> list[Event]:
        """Read the received data. Raises ConnectionLostError: the server has closed the connection or broken the protocol."""
        data = self.received()
        if data is None:
            return []
        try:
            self.http2.receive_data(data)
            events = self.http2.events()
        except NGH2Error as error:
            raise ConnectionLostError(f"the server does not speak HTTP/2 as expected: {error}") from None
        return events

    def note(self, event: Event) -> None:
        """Handle an event that belongs to no call."""
        if isinstance(event, GoAwayReceived | ConnectionClosed):
            self.usable = False

    def cancel(self, stream: int) -> None:
        with contextlib.suppress(NGH2Error):
            self.http2.reset_stream(stream, CANCEL)

    def _more(self) -> bytes:
        return self.http2.data_to_send(WRITE_BYTES)

    def _held_back_bytes(self) -> int:
        return self.http2.queued_body_size()  # held back by the server's flow control

    def _greet(self, until_s: float) -> None:
        settings = {ENABLE_PUSH: 0, INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES, MAX_FRAME_SIZE: FRAME_BYTES}
        self.http2.initiate_connection(settings)
        self.http2.set_local_window_size(CONNECTION_WINDOW_BYTES)
        self.flush()
        while not any(isinstance(event, SettingsReceived) for event in self.receive()):
            if time.monotonic() > until_s:
                raise ConnectionLostError("the server does not greet; is this its gRPC port?")
        self.flush()
        self._socket.setblocking(False)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
