"""The options that `halfserve infer` and `halfserve models` share: whom to ask, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from serve.client.errors import InvalidRequest
from serve.client.inference_client import InferenceClient
from serve.client.tls import Tls

Address = Annotated[str, typer.Option(help="HOST:PORT of the server's gRPC port, or unix:/path of its socket.")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.", min=0.001)]
Retries = Annotated[int, typer.Option(help="Ask again, where that is safe, so many times.", min=0, max=10)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
TlsCa = Annotated[Path | None, typer.Option(help="PEM file of who signed the server's certificate; turns TLS on.")]
TlsCert = Annotated[Path | None, typer.Option(help="PEM file of this client's certificate, for mTLS.")]
TlsKey = Annotated[Path | None, typer.Option(help="PEM file of its private key.")]
TlsName = Annotated[str | None, typer.Option(help="The name in the server's certificate, if it is not the address's.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the bearer token.", envvar="HALFSERVE_TOKEN_FILE")]
Headers = Annotated[list[str] | None, typer.Option("--header", help="NAME:VALUE of gRPC metadata; once per header.")]

ADDRESS, TIMEOUT_S = "127.0.0.1:8001", 10.0


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """What was given on the command line.

    Attributes:
        address: see `Address`, as the others see theirs.
        timeout: seconds.
        retries: of one call.
        tls_ca: PEM file.
        tls_cert: PEM file.
        tls_key: PEM file.
        tls_name: in the server's certificate.
        token_file: whose first line is the token.
        headers: NAME:VALUE.
    """

    address: str
    timeout: float
    retries: int
    tls_ca: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_name: str | None
    token_file: Path | None
    headers: Sequence[str] | None

    def connect(self, **options: Any) -> InferenceClient:
        """A client; it connects at its first call.

        Raises:
            InvalidRequest: an option is not what it should be; the text names it.
        """
        tls = None
        if any((self.tls_ca, self.tls_cert, self.tls_key, self.tls_name)):
            tls = Tls(authorities=self.tls_ca, certificate=self.tls_cert, key=self.tls_key, server_name=self.tls_name)
        return InferenceClient(
            self.address,
            timeout_s=self.timeout,
            retries=self.retries,
            tls=tls,
            token=None if self.token_file is None else _token(self.token_file),
            metadata=dict(_header(text) for text in self.headers or ()),
            **options,
        )


def _token(path: Path) -> str:
    try:
        lines = path.read_text(encoding="ascii").split()
    except OSError as error:
        raise InvalidRequest(f"--token-file {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"--token-file {path}: expected a token of ASCII characters") from None
    if len(lines) != 1:
        raise InvalidRequest(f"--token-file {path}: expected one token and nothing else, found {len(lines)} words")
    return lines[0]


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon:
        raise InvalidRequest(f"--header {text}: expected NAME:VALUE")
    return name.strip(), value.strip()
