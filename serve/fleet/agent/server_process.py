"""Process of the server that an agent starts, and its ports; the server ends when the agent's process does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from halfserve.serve.fleet.agent.worker_process import in_words, program
from halfserve.serve.fleet.member.handover import GRPC, HTTP, METRICS, VARIABLE, Handover
from halfserve.serve.transports.listening import Address, BindError, close, listen

ROWS = 32  # rows of consecutive ports that are tried
LEAVE = ("--lame-duck-seconds", "1")  # time for clients to see the server leave; later options override it
LAST_LINES = 20  # lines of the server's log that are kept
BEFORE_WHY = re.compile(r"^(halfserve serve|Error): ")  # start of the log line that says why the server ended


class AgentError(Exception):
    """The server cannot be started, or has ended; the text is one line with the reason."""


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """Options of an agent.

    Attributes:
        path: model repository: a folder, or a URL of object storage.
        group: name of the group of servers that share a wanted state.
        patterns: names, or patterns of names, of the models that the group has.
        arguments: further options of `halfserve serve`, such as ("--cpu", "--threads", "2").
        host: address to listen on.
        advertised_host: host under which clients reach this machine; "" for `host`.
        first_port: first of the server's three consecutive ports (gRPC, HTTP, metrics), or its single port with --no-http. If
            taken, the next free row of ports is used, among 31 further rows; 0 for any free ports.
        machine: name that distinguishes machines for users; "" for the host name.
        folder: folder in which the agent makes the one that it shares with the server; None for the temporary folder.
    """

    path: str
    group: str = ""
    patterns: tuple[str, ...] = ("*",)
    arguments: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    advertised_host: str = ""
    first_port: int = 8001
    machine: str = ""
    folder: Path | None = None


class Ports:
    """Listening sockets for a server."""

    def __init__(self, host: str, first: int, names: Sequence[str]) -> None:
        """Listen on a row of free ports, one for each name, the first on port `first`; 0 for any free ports.

        Raises:
            AgentError: none of the rows is free, or this machine does not have the address.
        """
        for row in range(ROWS):
            opened: dict[str, list[socket.socket]] = {}
            try:
                for number, name in enumerate(names):
                    port = first + row * len(names) + number if first else 0
                    opened[name] = listen(Address(host, port, "first port"))
            except BindError as error:
                for sockets in opened.values():
                    close(sockets)
                refused = error
            else:
                self.sockets: Mapping[str, Sequence[socket.socket]] = opened
                return
        raise AgentError(f"no {len(names)} ports in a row are free from {first} on, in {ROWS} rows: {refused}")

    def __getitem__(self, name: str) -> int:
        return int(self.sockets[name][0].getsockname()[1]) if name in self.sockets else 0

    def close(self) -> None:
        """Close this process's copies of the sockets."""
        for sockets in self.sockets.values():
            close(sockets)


class ServerProcess:
    """A running `halfserve serve`. Lives on the event loop.

    Attributes:
        code: exit code of the process, or negative number of the signal that ended it; None while it runs.
        ended: set when the process has ended.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        self.ended = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)

    @property
    def pid(self) -> int:
        """Process id; 0 before it is started."""
        return 0 if self._process is None else self._process.pid

    async def start(self, path: str, arguments: Sequence[str], host: str, ports: Ports, folder: Path, member: str) -> None:
        """Start the server, and return once it is ready; this process's copies of the sockets are closed.

        Raises:
            AgentError: the server cannot be started, or ended before it was ready.
        """
        lifeline, held = os.pipe()  # the server ends when `held` closes, that is, when this process is gone
        ready_file, ready = os.pipe()
        log_file, log = os.pipe()
        handover = Handover(
            sockets={name: [one.fileno() for one in sockets] for name, sockets in ports.sockets.items()},
            lifeline=lifeline,
            ready=ready,
            restarts=0,
            folder=str(folder),
            member=member,
            parent=os.getpid(),
        )
        given = [*(one.fileno() for sockets in ports.sockets.values() for one in sockets), lifeline, ready]
        options = ("--model-control", "explicit", "--host", host, *_ports(ports), *LEAVE, *arguments)
        command = [*program("halfserve"), "serve", path, *options]
        environment = {**os.environ, VARIABLE: handover.to_text()}
        try:
            # The system kills the server when the thread that started it ends; that of the event loop lives as long as this
            # process. In a session of its own: Ctrl-C in a terminal reaches only the agent, which then drains the server.
            self._process = await asyncio.create_subprocess_exec(
                *command, env=environment, pass_fds=given, stderr=log, start_new_session=True
            )
        except BaseException as error:
            for file in (held, ready_file, log_file):
                os.close(file)
            if isinstance(error, OSError):
                raise AgentError(f"the server cannot be started: {error.strerror}") from None
            raise
        finally:
            ports.close()
            for file in (lifeline, ready, log):
                os.close(file)
        self._waiting = asyncio.create_task(self._wait(self._process, log_file, held))
        if not await self._is_ready(ready_file):
            await self.ended.wait()
            raise AgentError(f"the server cannot serve {path}: {self.why()}")

    def why(self) -> str:
        """Return how the server ended, with the last line of its log if that gives the reason."""
        code = self.code or 0
        last = next((line for line in reversed(self._lines) if line), "") if code > 0 else ""
        return BEFORE_WHY.sub("", last) or in_words(code)

    def terminate(self) -> None:
        """Have the server drain and end."""
        if self.code is None and self.pid:
            os.kill(self.pid, signal.SIGTERM)

    async def stop(self) -> None:
        """End the server if it was started; return when it has ended."""
        if self._process is not None:
            self.terminate()
            await self.ended.wait()

    async def _wait(self, process: asyncio.subprocess.Process, log_file: int, held: int) -> None:
        reader = threading.Thread(target=self._read_log, args=(log_file,), name="halfserve server log", daemon=True)
        reader.start()
        code = await process.wait()
        await asyncio.to_thread(reader.join, 1.0)  # a child process of the server may still hold the pipe's other end
        self.code = code
        os.close(held)
        self.ended.set()

    def _read_log(self, log_file: int) -> None:
        with open(log_file, "rb") as log:
            for line in log:
                text = line.decode(errors="replace")
                self._lines.append(text.strip())
                with contextlib.suppress(OSError, ValueError):  # stderr may be closed
                    sys.stderr.write(text)
                    sys.stderr.flush()

    async def _is_ready(self, ready_file: int) -> bool:
        """Wait until the server is ready; False if it ended instead."""
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(ready_file, lambda: None if readable.done() else readable.set_result(None))
        try:
            await readable
            return bool(os.read(ready_file, 1))
        finally:
            loop.remove_reader(ready_file)
            os.close(ready_file)


def _ports(ports: Ports) -> list[str]:
    options = ["--grpc-port", str(ports[GRPC])]
    if HTTP in ports.sockets:
        options += ["--http-port", str(ports[HTTP]), "--metrics-port", str(ports[METRICS])]
    return options
