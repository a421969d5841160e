"""Run one suite: make its repository, start the server, run the test file's methods, and report the outcome of each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.triton_qa.server import Server, ServerError
from tests.triton_qa.suite import Suite

OWN = Path(__file__).parent / "own"
STUBS = Path(__file__).parent / "stubs"
CHECKOUT = Path(__file__).parents[2]
POLL_SECONDS = 0.05
COLLECT_SECONDS = 120.0
NO_END = "the method did not end in time"


@dataclass(frozen=True, kw_only=True)
class Method:
    """Outcome of one test method."""

    name: str  # the method's, with its class
    outcome: str  # passed, failed or skipped
    error: str = ""  # the first line of the error of a failed method
    is_text: bool = False  # whether the method failed because an error has other words than it expects
    seconds: float = 0.0  # how long it took


class SuiteRun:
    """A suite on its way: a copy of the QA's files, and a server that is started again where it ended."""

    def __init__(self, suite: Suite, *, qa: Path, work: Path, command: Sequence[str], http_port: int) -> None:
        """Copy the suite's files to `work` and make its model repository.

        Args:
            suite: the suite to run.
            qa: the QA's folder in Triton's sources.
            work: an empty folder.
            command: starts a server when it is followed by flags of tritonserver.
            http_port: the port at which the server says that it is ready.
        """
        self._suite, self._command, self._http_port = suite, command, http_port
        top, copy = Path(suite.tests).parts[0], work / "qa"
        shutil.copytree(qa / top, copy / top, ignore=shutil.ignore_patterns("*.cc", "*.pt"))
        for helper in sorted((qa / "common").glob("*.py")) if (qa / "common").is_dir() else ():
            (copy / "common").mkdir(exist_ok=True)
            shutil.copy(helper, copy / "common")
        self._file = copy / suite.tests
        if not self._file.exists():
            shutil.copy(OWN / self._file.name, self._file)
        self._repository = self._file.parent / suite.repository
        shutil.rmtree(self._repository, ignore_errors=True)
        self._repository.mkdir(parents=True)
        for build in suite.models:
            build(qa, self._repository)
        self._outcomes = work / "outcomes.jsonl"
        self._output = work / "tests.log"
        self._log = self._file.parent / suite.log
        self._server: Server | None = None
        paths = [str(CHECKOUT), str(copy / "common"), os.environ.get("PYTHONPATH", ""), str(STUBS)]
        self._places = {"root": str(work), "models": str(self._repository), "tests": str(self._file.parent)}
        self._variables = {name: value.format(**self._places) for name, value in suite.environment.items()}
        self._environment = {
            **os.environ,
            **self._variables,
            "SERVER_LOG": str(self._log),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }

    def run(self) -> list[Method]:
        """Run each method; those of one server run in one process, until one of them fails to end."""
        try:
            try:
                waiting = self._collect()
            except ServerError as error:
                return [Method(name="collection", outcome="failed", error=str(error))]
            reasons = {name: reason for name in waiting for left, reason in self._suite.left_out.items() if name.endswith(left)}
            found = [Method(name=name, outcome="skipped", error=reason) for name, reason in reasons.items()]
            waiting = [name for name in waiting if name not in reasons]
            while waiting:
                batch = self._batch(waiting)
                done = self._run(batch)
                found += done
                ended = {method.name for method in done}
                waiting = [name for name in waiting if name not in ended]
                if self._suite.has_fresh_servers:
                    self._stop()
            return found
        finally:
            self._stop()

    def _batch(self, waiting: list[str]) -> list[str]:
        """Return the methods that one process runs; before the suite's last one, the server's child processes may be killed."""
        last = self._suite.kills_children_before
        if not last:
            return waiting[:1] if self._suite.has_fresh_servers else waiting
        others = [name for name in waiting if not name.endswith(last)]
        if not others and self._server is not None:
            self._server.kill_children()
        return others or waiting

    def _collect(self) -> list[str]:
        """Return the names of the suite's methods."""
        process = self._test([])
        try:
            process.wait(COLLECT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        lines = self._lines()
        if not lines:
            tail = self._output.read_text(errors="replace").strip().splitlines()
            raise ServerError(f"there are no methods in {self._suite.tests}: {tail[-1] if tail else ''}")
        wanted = self._suite.methods
        return [name for name in lines[0]["methods"] if not wanted or name in wanted or name.rpartition(".")[2] in wanted]

    def _run(self, names: list[str]) -> list[Method]:
        """Run methods in the order given, up to the first that does not end."""
        try:
            self._start()
        except ServerError as error:
            return [Method(name=name, outcome="failed", error=str(error)) for name in names]
        done = self._watch(self._test(names))
        missing = [name for name in names if all(method.name != name for method in done)]
        if missing and (not done or done[-1].error != NO_END):
            tail = self._output.read_text(errors="replace").strip().splitlines()
            done.append(
                Method(name=missing[0], outcome="failed", error=f"the process of tests ended: {tail[-1] if tail else ''}")
            )
        return done

    def _watch(self, process: subprocess.Popen[bytes]) -> list[Method]:
        """Follow the file of outcomes until the process ends or one method takes too long."""
        since, seen = time.monotonic(), 0
        while process.poll() is None:
            lines = self._lines()
            if len(lines) != seen:
                since, seen = time.monotonic(), len(lines)
            if time.monotonic() - since > self._suite.method_seconds:
                process.kill()
                process.wait()
                self._stop()
                return _methods(self._lines(), is_complete=False)
            time.sleep(POLL_SECONDS)
        if self._server is not None and not self._server.is_running:
            self._server = None
        return _methods(self._lines(), is_complete=True)

    def _test(self, names: list[str]) -> subprocess.Popen[bytes]:
        self._outcomes.unlink(missing_ok=True)
        with self._output.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.triton_qa.methods", str(self._file), str(self._outcomes), *names],
                cwd=self._file.parent,
                env=self._environment,
                stdout=file,
                stderr=file,
            )

    def _lines(self) -> list[dict[str, Any]]:
        if not self._outcomes.exists():
            return []
        return [json.loads(line) for line in self._outcomes.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def _start(self) -> None:
        if self._server is not None and self._server.is_running:
            return
        flags = [flag.format(**self._places) for flag in self._suite.flags]
        if not any(flag.startswith("--model-repository") for flag in flags):
            flags.insert(0, f"--model-repository={self._repository}")
        self._server = Server(
            [*self._command, *flags],
            environment=self._variables,
            log=self._log,
            http_port=self._http_port,
            folder=self._file.parent,
            ready_path=self._suite.ready_path,
        )
        self._environment["SERVER_PID"] = str(self._server.pid)

    def _stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None


def _methods(lines: list[dict[str, Any]], *, is_complete: bool) -> list[Method]:
    """Return the methods that started, in their order; a method that failed in one of its phases has failed."""
    found: dict[str, Method] = {}
    started: dict[str, float] = {}
    for line in lines:
        if "name" not in line:
            continue
        name = str(line["name"])
        at = float(str(line["at"]))
        started.setdefault(name, at)
        if "outcome" not in line or (name in found and found[name].outcome == "failed"):
            continue
        found[name] = Method(
            name=name,
            outcome=str(line["outcome"]),
            error=str(line.get("error", "")),
            is_text=bool(line.get("is_text")),
            seconds=round(at - started[name], 2),
        )
    for name in started:
        if name not in found and not is_complete:
            found[name] = Method(name=name, outcome="failed", error=NO_END)
    return list(found.values())
