"""The options that `halfserve infer`, `halfserve models` and `halfserve bench` share: whom to ask, and how."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

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
    """What was given on the command line of who this client is, and whom it trusts; each field is an option."""

    use_tls: Annotated[bool, _connection("--tls", help="Encrypt; every other option of TLS does so too.")] = False
    tls_ca: Annotated[
        Path | None,
        _connection(help="PEM file of who may have signed the server's certificate, if not whom the system trusts."),
    ] = None
    tls_cert: Annotated[Path | None, _connection(help="PEM file of this client's certificate, for mTLS.")] = None
    tls_key: Annotated[Path | None, _connection(help="PEM file of its private key.")] = None
    tls_name: Annotated[str | None, _connection(help="The name in the server's certificate, if it is not the address's.")] = (
        None
    )
    token_file: Annotated[Path | None, _connection(help="File with the bearer token.", envvar="HALFSERVE_TOKEN_FILE")] = None
    headers: Annotated[list[str] | None, _connection("--header", help="NAME:VALUE of gRPC metadata; once per header.")] = None

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


def takes_credentials(command: Callable[..., None]) -> Callable[..., None]:
    """Show a command's parameter `credentials` to typer as the options that it consists of."""
    types = get_type_hints(Credentials, include_extras=True)
    options = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name])
        for field in fields(Credentials)
    ]

    @wraps(command)
    def with_options(**given: Any) -> None:
        command(credentials=Credentials(**{option.name: given.pop(option.name) for option in options}), **given)

    signature = inspect.signature(command, eval_str=True)
    shown: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        shown += options if parameter.name == "credentials" else [parameter]
    with_options.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return with_options


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
