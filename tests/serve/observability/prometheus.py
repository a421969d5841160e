"""A real Prometheus that scrapes servers of this machine, and its HTTP API."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

PLACES = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
PROMETHEUS, PROMTOOL = (shutil.which(name, path=PLACES) for name in ("prometheus", "promtool"))
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="there is no prometheus here, which Debian's package has")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool here, which Debian's package prometheus has")
CONFIG = """
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [%(rules)s]
scrape_configs: [{job_name: halfserve, static_configs: [{targets: %(targets)s}]}]
"""
READY = "Server is ready to receive web requests."


@dataclass(frozen=True)
class Series:
    """One series of a query's answer: its labels and its value now."""

    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus that takes queries at `url`."""

    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 (`url` begins with http)
                return json.load(answer)["data"]
        except HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def query(self, expression: str) -> list[Series]:
        found = self.ask("query", query=expression)["result"]
        return [Series(series["metric"], float(series["value"][1])) for series in found]


@contextmanager
def running_prometheus(folder: Path, port: int, targets: Sequence[str], rules: Path) -> Iterator[Prometheus]:
    """Start Prometheus with its files in `folder`, which scrapes each target every second; kill it at the end."""
    (folder / "prometheus.yml").write_text(CONFIG % {"rules": rules, "targets": json.dumps(list(targets))})
    command = [str(PROMETHEUS), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            said: list[str] = []
            for line in process.stderr or ():
                said.append(line)
                if READY in line:
                    break
            else:
                raise AssertionError(f"prometheus did not start: {''.join(said)}")
            yield Prometheus(f"http://127.0.0.1:{port}")
        finally:
            process.kill()
