"""Duration of the first hour's commands on a fresh clone of this checkout's last commit: wall time and processor time.

python -m benchmarks.first_hour

The packages come from pip's configured index, and from uv's cache if they are in it: `--cold` starts with an empty cache. Wall
time is only meaningful on an idle machine; processor seconds (user and system, all cores) also on a busy one.
"""

from __future__ import annotations

import os
import resource
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from halfserve.compiled_build import SWITCH

ROOT = Path(__file__).parent.parent
EDITED = "serve/transports/nghttp2/session.py"  # in the folder that takes longest to compile
EDIT = f"echo 'EDITED = \"a new constant\"' >> {EDITED}"
STEPS = (
    ("clone", f"git clone --quiet {ROOT} ."),
    ("make install", "make install"),
    ("make demo, installed", "make demo"),
    ("make compile, after an edit", f"{EDIT} && make compile"),
    ("make dev, installed", "make dev"),
)


def processor_seconds() -> float:
    """User and system time of all child processes that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(*, cold: Annotated[bool, typer.Option(help="Download every package again.")] = False) -> None:
    hidden = {"VIRTUAL_ENV", "PYTHONPATH", SWITCH}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    with TemporaryDirectory() as folder:
        clone = Path(folder) / "halfserve"
        clone.mkdir()
        if cold:
            environment["UV_CACHE_DIR"] = f"{folder}/cache"
        with (Path(folder) / "log").open("w+") as log:
            for name, command in STEPS:
                started, used = time.monotonic(), processor_seconds()
                done = subprocess.run(command, shell=True, cwd=clone, env=environment, stdout=log, stderr=log, check=False)  # noqa: S602  (the steps above)
                if done.returncode:
                    log.seek(0)
                    print("".join(log.readlines()[-20:]))
                    raise typer.Exit(1)
                print(f"{name:30}{time.monotonic() - started:8.1f} s{processor_seconds() - used:8.1f} processor s", flush=True)


if __name__ == "__main__":
    typer.run(main)
