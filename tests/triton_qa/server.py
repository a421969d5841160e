"""The server under test: a process that takes the flags of tritonserver."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

START_SECONDS = 120.0
STOP_SECONDS = 60.0


class ServerError(Exception):
    """The server does not start; the text has the end of its log."""


class Server:
    """A running server.

    Attributes:
        log: the file of its standard output and error.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        http_port: int,
        folder: Path,
        ready_path: str,
    ) -> None:
        """Start the server and wait until it is ready.

        Raises:
            ServerError: the process ended, or was not ready in time.
        """
        self.log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **environment}, cwd=folder)
        try:
            self._wait(http_port, ready_path)
        except BaseException:
            self.stop()
            raise

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def stop(self) -> None:
        """End the process, by force where it takes too long."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill_children(self) -> None:
        """Kill the processes of the server's models."""
        for process in _descendants(self.pid):
            if not _children(process):
                os.kill(process, signal.SIGKILL)

    def _wait(self, port: int, ready_path: str) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if not self.is_running:
                break
            try:
                live = _status(port, "/v2/health/live")
                if not ready_path and not _is_loading(port):
                    return
                # A restricted API is an answer too.
                if ready_path and live in {200, 401, 403} and _status(port, ready_path) in {200, 401, 403}:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        lines = self.log.read_text(errors="replace").strip().splitlines()
        raise ServerError(f"the server did not start: {lines[-1] if lines else 'its log is empty'}")


def _status(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://localhost:{port}{path}", timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def _is_loading(port: int) -> bool:
    """Return whether a model is being loaded; a server that failed to start says so by an error, and loads nothing."""
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/v2/repository/index", data=b"{}", timeout=5) as response:
            return b'"LOADING"' in response.read()
    except urllib.error.HTTPError:
        return False


def _children(process: int) -> list[int]:
    try:
        files = Path(f"/proc/{process}/task").glob("*/children")
        return [int(child) for file in files for child in file.read_text().split()]
    except OSError:  # a thread or the process has ended since
        return []


def _descendants(process: int) -> Iterator[int]:
    for child in _children(process):
        yield child
        yield from _descendants(child)
