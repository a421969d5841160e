"""Options that the commands of a client share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from halfserve.serve.client.channel_settings import Tls, headers_of
from halfserve.serve.client.cli.inputs import InputArgumentError
from halfserve.serve.client.client import Client
from halfserve.serve.client.errors import InvalidRequest

_connection = partial(typer.Option, rich_help_panel="Connection")
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ADDRESS = "127.0.0.1:8001"


@contextmanager
def reading_options() -> Iterator[None]:
    """Report an argument that the client rejects as an invalid option."""
    try:
        yield
    except InvalidRequest as error:
        raise InputArgumentError(str(error)) from None


@dataclass(frozen=True, kw_only=True)
class Credentials:
    use_tls: Annotated[bool, _connection("--tls", help="Encrypt the connection; the other --tls options imply it.")] = False
    tls_ca: Annotated[
        Path | None,
        _connection(
            help="PEM file of the authority that signed the server's certificate; by default those that the system trusts."
        ),
    ] = None
    tls_cert: Annotated[Path | None, _connection(help="PEM file of this client's certificate, for mTLS.")] = None
    tls_key: Annotated[Path | None, _connection(help="PEM file of the certificate's private key.")] = None
    tls_name: Annotated[str | None, _connection(help="Name in the server's certificate, if it is not that of the address.")] = (
        None
    )
    token_file: Annotated[Path | None, _connection(help="File with the bearer token.", envvar="HALFSERVE_TOKEN_FILE")] = None
    headers: Annotated[
        list[str] | None,
        # hidden where options are printed, because the value may be a credential
        _connection("--header", help="NAME:VALUE to send as gRPC metadata; may be repeated.", hide_input=True),
    ] = None

    def tls(self) -> Tls | None:
        """Certificates for an encrypted connection; None for a plain one.
        Raises InputArgumentError: a file is missing or is no PEM file; the text names it.
        """
        if not any((self.use_tls, self.tls_ca, self.tls_cert, self.tls_key, self.tls_name)):
            return None
        with reading_options():
            return Tls(authorities=self.tls_ca, certificate=self.tls_cert, key=self.tls_key, server_name=self.tls_name)

    def token(self) -> str | None:
        """Return the bearer token. Raises InputArgumentError: the file does not hold one token; the text names it."""
        return None if self.token_file is None else read_token(self.token_file)

    def metadata(self) -> dict[str, str]:
        """Headers, as gRPC metadata, of each call besides the token.
        Raises InputArgumentError: a header is malformed; the text shows it.
        """
        given = dict(_header(text) for text in self.headers or ())
        with reading_options():
            headers_of(given)
        return given


@dataclass(frozen=True, kw_only=True)
class Connection:
    address: Annotated[
        str,
        _connection(
            help="HOST:PORT of the server's gRPC port, unix:/path of its socket, or cluster://HOST:PORT,... of a cluster."
        ),
    ] = ADDRESS
    timeout: Annotated[float, _connection(help="Seconds to wait for an answer.", min=0.001)] = 10.0
    retries: Annotated[
        int | None,
        _connection(
            help="Number of times to repeat a failed call, where that is safe; by default 0, in a cluster 3.", min=0, max=10
        ),
    ] = None
    credentials: Credentials

    def client(self, **options: Any) -> Client:
        """Return a client; it connects at its first call. Raises InputArgumentError: an option is malformed; the
        text names it.
        """
        tls, token, metadata = self.credentials.tls(), self.credentials.token(), self.credentials.metadata()
        with reading_options():
            return Client(
                self.address, timeout_s=self.timeout, retries=self.retries, tls=tls, token=token, metadata=metadata, **options
            )


def read_token(path: Path) -> str:
    """Return the token in a file. Raises InputArgumentError: the file cannot be read, or holds anything else."""
    try:
        words = path.read_text(encoding="ascii").split()
    except OSError as error:
        raise InputArgumentError(f"--token-file {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputArgumentError(f"--token-file {path}: expected a token of ASCII characters") from None
    if len(words) != 1:
        raise InputArgumentError(f"--token-file {path}: expected one token and nothing else, found {len(words)} words")
    return words[0]


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon:
        raise InputArgumentError(f"--header {text}: expected NAME:VALUE")
    return name.strip(), value.strip()
