"""`halfserve token`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from halfserve.serve.protocol.rpc import Role
from halfserve.serve.security.security_options import SecurityError
from halfserve.serve.security.tokens import new_token, parse_end, write_time

EXIT_CODES: dict[type[Exception], int] = {SecurityError: 1}


def token(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the token's holder: up to 64 characters of A-Z a-z 0-9 _ . @ -")
    ],
    role: Annotated[list[Role] | None, typer.Option(help="What the token allows; may be repeated; by default infer.")] = None,
    *,
    expires: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="When the token expires: 90d, 12h, 30m, or a date or time in UTC; by default never."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A model that the token may use, or a pattern such as 'digits*'; may be repeated; by default all.",
        ),
    ] = None,
    add_to: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Add the line to this token file, which is created if it does not exist."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a bearer token, and the line that lets it into a server.

    The token alone goes to the standard output, once: it is kept nowhere. Its line, which holds a hash, goes into the file of
    `halfserve serve --token-file` (--add-to), or else to the standard error.

    Example: halfserve token alice --expires 90d --model 'digits*' --add-to tokens.txt > alice.token
    """
    expires_s = None if expires is None else parse_end(expires, time.time())
    models = sorted(set(model or []))
    secret, line = new_token(name, role or [Role.INFER], expires_s=expires_s, models=models)
    until = None if expires_s is None else write_time(expires_s)
    if add_to is not None:
        _add(add_to, name, line)
    if as_json:
        content = {"name": name, "token": secret, "line": line, "expires": until, "models": models or None}
        typer.echo(json.dumps(content))
        return
    lifetime = "" if until is None else f", until {until}"
    if add_to is None:
        # A comment, so that both lines may stand in the file.
        typer.echo(f"# token of {name}{lifetime}; the line for the server's --token-file:\n{line}", err=True)
    else:
        typer.echo(f"token of {name}{lifetime}: its line is in {add_to}", err=True)
    typer.echo(secret)


def _add(path: Path, name: str, line: str) -> None:
    """Append a line to a token file; a server that reads meanwhile sees it whole or not at all."""
    try:
        text = path.read_text("utf-8") if path.exists() else ""
        if any(known.partition(":")[0].strip() == name for known in text.splitlines()):
            raise SecurityError(f"token file {path} has a token of {name!r}; remove its line, or choose another name")
        end = "\n" if text and not text.endswith("\n") else ""
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, f"{end}{line}\n".encode())
        finally:
            os.close(file)
    except UnicodeDecodeError:
        raise SecurityError(f"token file {path} is not UTF-8 text; choose another file") from None
    except OSError as error:
        raise SecurityError(f"token file {path} cannot be written: {error.strerror}") from None
