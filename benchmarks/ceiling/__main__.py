"""Upper limit of a load generator on this machine: a server in C that replays a running server's answers without computing.

    python -m benchmarks.ceiling 127.0.0.1:8001/mlp --port 18100

Needs a C compiler and libnghttp2's headers (Debian packages gcc and libnghttp2-dev). Then load 127.0.0.1:18100/mlp.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import grpc
import typer

from benchmarks.ceiling.answers import save_answers

SOURCE = Path(__file__).with_name("answer_at_once.c")


def main(
    model: Annotated[str, typer.Argument(metavar="HOST:PORT/MODEL", help="Whose answers are given.")],
    port: Annotated[int, typer.Option(help="Where to listen, on 127.0.0.1.", min=1, max=65535)] = 18100,
) -> None:
    """Serve the answers of a model until Ctrl-C."""
    address, slash, name = model.rpartition("/")
    compiler = shutil.which("cc")
    if not slash:
        raise typer.BadParameter(f"{model}: expected HOST:PORT/MODEL")
    if compiler is None:
        raise typer.BadParameter("no C compiler was found; install gcc")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "answer_at_once"
        if subprocess.run([compiler, "-O2", "-o", program, SOURCE, "-lnghttp2"], check=False).returncode:
            raise typer.BadParameter("the server does not compile; install libnghttp2-dev")
        try:
            with grpc.insecure_channel(address) as channel:
                save_answers(channel, name, Path(folder))
        except grpc.RpcError as error:
            raise typer.BadParameter(f"{model} does not answer: {error.details()}") from error
        typer.echo(f"127.0.0.1:{port}/{name} answers at once; Ctrl-C stops")
        try:
            raise typer.Exit(subprocess.run([program, str(port), folder], check=False).returncode)
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    typer.run(main)
