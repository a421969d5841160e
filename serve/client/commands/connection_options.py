"""The options that `halfserve infer`, `halfserve models` and `halfserve bench` share: whom to ask, and how."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from serve.client.commands.input_files import InputArgumentError
from serve.client.connection.headers import headers_of
from serve.client.connection.tls import Tls
from serve.client.errors import InvalidRequest
from serve.client.inference_client import InferenceClient

_connection = partial(typer.Option, rich_help_panel="Connection")

Address = Annotated[str, _connection(help="HOST:PORT of the server's gRPC port, or unix:/path of its socket.")]
Timeout = Annotated[float, _connection(help="Seconds to wait for an answer.", min=0.001)]
Retries = Annotated[int, _connection(help="Ask again, where that is safe, so many times.", min=0, max=10)]
UseTls = Annotated[bool, _connection("--tls", help="Encrypt; every other option of TLS does so too.")]
TlsCa = Annotated[
    Path | None, _connection(help="PEM file of who may have signed the server's certificate, if not whom the system trusts.")
]
TlsCert = Annotated[Path | None, _connection(help="PEM file of this client's certificate, for mTLS.")]
TlsKey = Annotated[Path | None, _connection(help="PEM file of its private key.")]
TlsName = Annotated[str | None, _connection(help="The name in the server's certificate, if it is not the address's.")]
TokenFile = Annotated[Path | None, _connection(help="File with the bearer token.", envvar="HALFSERVE_TOKEN_FILE")]
Headers = Annotated[list[str] | None, _connection("--header", help="NAME:VALUE of gRPC metadata; once per header.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

ADDRESS, TIMEOUT_S = "127.0.0.1:8001", 10.0


@contextmanager
def _reading_options() -> Iterator[None]:
    """What the client has against an argument is about an option here."""
    try:
        yield
    except InvalidRequest as error:
        raise InputArgumentError(str(error)) from None


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """What was given on the command line of who this client is, and whom it trusts.

    Attributes:
        use_tls: even if no file says so.
        tls_ca: PEM file.
        tls_cert: PEM file.
        tls_key: PEM file.
        tls_name: in the server's certificate.
        token_file: whose only word is the token.
        headers: NAME:VALUE.
    """

    use_tls: bool
    tls_ca: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_name: str | None
    token_file: Path | None
    headers: Sequence[str] | None

    def tls(self) -> Tls | None:
        """For an encrypted connection; None for a plain one.

        Raises:
            InputArgumentError: a file is not what it should be; the text names it.
        """
        if not any((self.use_tls, self.tls_ca, self.tls_cert, self.tls_key, self.tls_name)):
            return None
        with _reading_options():
            return Tls(authorities=self.tls_ca, certificate=self.tls_cert, key=self.tls_key, server_name=self.tls_name)

    def token(self) -> str | None:
        """Of each call.

        Raises:
            InputArgumentError: the file is not what it should be; the text names it.
        """
        return None if self.token_file is None else _token(self.token_file)

    def metadata(self) -> dict[str, str]:
        """Of each call, beside the token.

        Raises:
            InputArgumentError: a header is none; the text shows it.
        """
        given = dict(_header(text) for text in self.headers or ())
        with _reading_options():
            headers_of(given)
        return given


def connect(address: str, credentials: Credentials, *, timeout: float, retries: int, **options: Any) -> InferenceClient:
    """A client; it connects at its first call.

    Raises:
        InputArgumentError: an option is not what it should be; the text names it.
    """
    tls, token, metadata = credentials.tls(), credentials.token(), credentials.metadata()
    with _reading_options():
        return InferenceClient(address, timeout_s=timeout, retries=retries, tls=tls, token=token, metadata=metadata, **options)


def _token(path: Path) -> str:
    try:
        lines = path.read_text(encoding="ascii").split()
    except OSError as error:
        raise InputArgumentError(f"--token-file {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputArgumentError(f"--token-file {path}: expected a token of ASCII characters") from None
    if len(lines) != 1:
        raise InputArgumentError(f"--token-file {path}: expected one token and nothing else, found {len(lines)} words")
    return lines[0]


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon:
        raise InputArgumentError(f"--header {text}: expected NAME:VALUE")
    return name.strip(), value.strip()
