"""Server processes, and what a test does to them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[3]
WAIT_S = 30.0


@dataclass(frozen=True)
class ServerProcess:
    """A server that takes requests.

    Attributes:
        process: the operating system's.
        address: "127.0.0.1:port".
        repository: that it serves.
        access_log: its file.
        errors: what it writes to standard error.
    """

    process: subprocess.Popen[str]
    address: str
    repository: Path
    access_log: Path
    errors: IO[bytes]

    def error_text(self) -> str:
        self.errors.seek(0)
        return self.errors.read().decode()

    def open_files(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def until(self, condition: Callable[[], bool], ask: Callable[[], object]) -> None:
        """Wait for a condition; each question to the server is a turn of its event loop."""
        for _ in range(20_000):
            if condition():
                return
            ask()
        raise AssertionError(f"it never came about; the server says: {self.error_text()}")


@contextmanager
def mad_server(repository: Path) -> Iterator[ServerProcess]:
    """The server of `server_program`; ends it, and looks at how it went."""
    access_log = repository.parent / "access.log"
    command = [sys.executable, "-m", "tests.serve.faults.server_program", str(repository), str(access_log)]
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            try:
                address = f"127.0.0.1:{process.stdout.readline().strip()}"
                yield ServerProcess(process, address, repository, access_log, errors)
                process.terminate()
                assert process.wait(WAIT_S) == 0
            finally:
                process.kill()
        errors.seek(0)
        assert b"Traceback" not in errors.read()
