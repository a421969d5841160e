"""`halfserve token`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from serve.security.errors import SecurityError
from serve.security.roles import Role
from serve.security.token_file import new_token

EXIT_CODES: dict[type[Exception], int] = {SecurityError: 1}


def token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who will hold it: up to 64 of A-Z a-z 0-9 _ . @ -")],
    role: Annotated[list[Role] | None, typer.Option(help="What it may do; once per role. infer where none is given.")] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a bearer token, and the line that lets it into a server.

    The line goes to the standard output, for the file that `halfserve serve --token-file` reads; the token goes to the standard
    error, once: it is kept nowhere.

    Example: halfserve token alice --role infer --role metrics >> tokens.txt
    """
    secret, line = new_token(name, role or [Role.INFER])
    if as_json:
        typer.echo(json.dumps({"name": name, "token": secret, "line": line}))
        return
    typer.echo(line)
    typer.echo(f"token of {name}: {secret}", err=True)
