"""`halfserve token`."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from halfserve.serve.security.options import SecurityError
from halfserve.serve.security.roles import Role
from halfserve.serve.security.tokens import new_token, parse_end, write_time

EXIT_CODES: dict[type[Exception], int] = {SecurityError: 1}


def token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who will hold it: up to 64 of A-Z a-z 0-9 _ . @ -")],
    role: Annotated[list[Role] | None, typer.Option(help="What it may do; once per role. infer where none is given.")] = None,
    *,
    expires: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="When it ends: 90d, 12h, 30m, or a date or time in UTC. Never where not given."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="What it may use: a model, or a pattern such as 'digits*'; once per model. Else all."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a bearer token, and the line that lets it into a server.

    The line goes to the standard output, for the file that `halfserve serve --token-file` reads; the token goes to the standard
    error, once: it is kept nowhere.

    Example: halfserve token alice --expires 90d --model 'digits*' >> tokens.txt
    """
    expires_s = None if expires is None else parse_end(expires, time.time())
    models = sorted(set(model or []))
    secret, line = new_token(name, role or [Role.INFER], expires_s=expires_s, models=models)
    until = None if expires_s is None else write_time(expires_s)
    if as_json:
        content = {"name": name, "token": secret, "line": line, "expires": until, "models": models or None}
        typer.echo(json.dumps(content))
        return
    typer.echo(line)
    typer.echo(f"token of {name}{'' if until is None else f', until {until}'}: {secret}", err=True)
