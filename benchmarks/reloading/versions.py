"""A model whose next version is always a different file, and its server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import onnx

from benchmarks.serving_models import Net, mlp

NAME = "net"


def wide() -> onnx.ModelProto:
    """64-2048-2048-2048-10: 17 MB of weights."""
    net = Net()
    net.linear(64, 2048)
    for _ in range(2):
        net.add("Relu", net.end)
        net.linear(2048, 2048)
    net.add("Relu", net.end)
    net.linear(2048, 10)
    return net.model(["batch", 64], ["batch", 10])


def deep() -> onnx.ModelProto:
    """64-64-...-64-10 over 300 layers with shortcuts: a graph that takes long to load, with few weights."""
    net = Net()
    net.linear(64, 64)
    for _ in range(300):
        shortcut = net.end
        net.linear(64, 64)
        net.add("Relu", net.end)
        net.add("Add", net.end, shortcut)
    net.linear(64, 10)
    return net.model(["batch", 64], ["batch", 10])


MODELS = {"mlp": mlp, "wide": wide, "deep": deep}


@dataclass
class Versions:
    """A model folder in which versions are added and removed.

    Attributes:
        repository: repository that contains the folder.
        latest: number of the newest version.
    """

    repository: Path
    latest: int
    _content: bytes

    @classmethod
    def of(cls, repository: Path, model: onnx.ModelProto) -> Versions:
        """Write a repository with the first version."""
        versions = cls(repository, 0, model.SerializeToString())
        versions.add()
        return versions

    def add(self) -> None:
        """Add a new version, whose file no server has seen, and remove all versions but the one before."""
        self.latest += 1
        name = onnx.ModelProto()
        name.metadata_props.add(key="version", value=str(self.latest))
        hidden = self.repository / NAME / f".{self.latest}"
        hidden.mkdir(parents=True)
        # Protobuf merges concatenated messages into one.
        (hidden / "model.onnx").write_bytes(self._content + name.SerializeToString())
        hidden.rename(hidden.with_name(str(self.latest)))
        if self.latest > 2:
            shutil.rmtree(self.repository / NAME / str(self.latest - 2))


@contextmanager
def serving(repository: Path, threads: int) -> Iterator[tuple[int, int]]:
    """Run `halfserve serve` with models loaded by request; yields port and process id. Earlier runs are not cached."""
    command = [sys.executable, "-m", "halfserve", "serve", str(repository), "--grpc-port", "0", "--no-http", "--cpu", "--json"]
    command += ["--model-control", "explicit", "--load-model", NAME, "--threads", str(threads)]
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile("w+") as log:
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process:
            try:
                line = cast("IO[str]", process.stdout).readline()
                if not line:
                    log.seek(0)
                    raise SystemExit(f"the server did not start: {log.read().strip()}")
                yield json.loads(line)["grpc_port"], process.pid
            finally:
                process.terminate()
