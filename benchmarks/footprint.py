"""How long `halfserve serve` takes from the start of the process until it takes requests, and the memory it then holds.

python benchmarks/startup.py model.onnx
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Annotated, cast

import typer


def started(model: Path) -> tuple[float, float]:
    """(milliseconds to the ready line, resident megabytes at that moment) of one server."""
    command = [sys.executable, "-m", "halfserve", "serve", str(model), "--grpc-port", "0", "--json"]
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        if not cast("IO[str]", server.stdout).readline():
            raise SystemExit("the server did not start; its message is above")
        milliseconds = (time.monotonic() - start) * 1e3
        status = Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
        kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        server.terminate()
    return milliseconds, kilobytes / 1e3


def main(model: Path, rounds: Annotated[int, typer.Option(min=1)] = 7) -> None:
    """Start the server again and again and print the medians."""
    started(model)  # fills the file cache
    runs = [started(model) for _ in range(rounds)]
    milliseconds, megabytes = (statistics.median(run[i] for run in runs) for i in range(2))
    print(f"ready after {milliseconds:.0f} ms, {megabytes:.0f} MB resident (medians of {rounds})")


if __name__ == "__main__":
    typer.run(main)
