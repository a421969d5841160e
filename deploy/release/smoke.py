"""The smoke test of an installed halfserve: convert, serve, ask and measure. It needs nothing of the checkout.

`python -P smoke.py` tries the installation that it runs in; the workflow of a release calls it so on each platform.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

READY_S = 300.0  # an emulated processor on a busy machine needs minutes
ROWS = [[1.0, -2.0, 3.0, 0.5], [0.0, 0.25, -1.0, 4.0]]
WEIGHTS = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(4, 3)
READY = re.compile(r"gRPC on ([^\s,]+),.* ready in ")
TOLERANCE = 1e-2  # of float16 and float32 answers of this model


class SmokeError(Exception):
    """A command fails, or an answer is wrong."""


@dataclass(frozen=True, kw_only=True)
class Installation:
    """An installed command.

    Attributes:
        scripts: folder of the command `halfserve`.
        folder: working folder of the command.
        variables: its whole environment.
    """

    scripts: Path
    folder: Path
    variables: Mapping[str, str]

    def halfserve(self, *arguments: str) -> str:
        """Run the command and return what it prints.

        Raises:
            SmokeError: it ends with another exit status than 0.
        """
        done = subprocess.run(
            [str(self.scripts / "halfserve"), *arguments],
            cwd=self.folder, env=self.variables, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SmokeError(f"halfserve {' '.join(arguments)} ends with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    @contextmanager
    def served(self, model: Path, *options: str) -> Iterator[tuple[str, float]]:
        """Serve a model or a repository on a free port; yields the address and the seconds until the server was ready.

        Without `options` of the command, it has gRPC alone.

        Raises:
            SmokeError: the server ends, or is not ready in time.
        """
        started = time.monotonic()
        server = subprocess.Popen(
            [str(self.scripts / "halfserve"), "serve", str(model), "--grpc-port", "0", *(options or ["--no-http"])],
            cwd=self.folder, env=self.variables, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        limit = threading.Timer(READY_S, server.kill)
        limit.start()
        try:
            yield _address(server), time.monotonic() - started
        finally:
            limit.cancel()
            server.terminate()
            server.communicate()


def smoke(installation: Installation, *, measures: bool = True) -> str:
    """Convert, serve, ask and measure (if `measures`) a small model.

    Returns:
        One line that says what was seen.

    Raises:
        SmokeError: a step fails, or an answer is wrong.
    """
    version = installation.halfserve("--version").strip()
    if "from the checkout" in version:
        raise SmokeError(f"the installation is not what runs: {version}")
    source, model = _save_model(installation.folder / "mlp.onnx"), installation.folder / "mlp16.onnx"
    installation.halfserve("convert", str(source), str(model))
    with installation.served(model) as (address, ready_s):
        connected = (model.stem, "--address", address, "--json")
        _check_answer(json.loads(installation.halfserve("infer", *connected, "--input", f"x={json.dumps(ROWS)}")))
        rate = _rate(installation, connected) if measures else ""
    return f"{version.partition(';')[0]}: converts, serves after {ready_s:.1f} s, answers right{rate}"


def _rate(installation: Installation, connected: Sequence[str]) -> str:
    measured = json.loads(installation.halfserve("bench", *connected, "--concurrency", "4", "--seconds", "1"))
    (level,) = measured["levels"]
    if level["errors"]:
        raise SmokeError(f"{level['errors']} requests of bench fail: {level['error_messages']}")
    return f", {level['requests_per_second']:.0f} requests/s with 4 in flight"


def _address(server: subprocess.Popen[str]) -> str:
    """Return the address that the server prints when it is ready."""
    for line in server.stdout or ():
        if found := READY.match(line):
            return found[1]
    raise SmokeError(f"the server ended with {server.wait()} before it was ready; its own lines stand above")


def _save_model(path: Path) -> Path:
    """Write a model of one matrix product and a Relu, float32, rows of 4 values to rows of 3."""
    weights = numpy_helper.from_array(WEIGHTS, "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["product"]), helper.make_node("Relu", ["product"], ["y"])]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph(nodes, "mlp", [x], [y], [weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def _check_answer(answer: dict[str, Any]) -> None:
    expected = np.maximum(np.array(ROWS) @ WEIGHTS, 0.0)
    given = np.array(answer["outputs"]["y"]["data"], dtype=np.float64)
    if given.shape != expected.shape or not np.allclose(given, expected, atol=TOLERANCE):
        raise SmokeError(f"the server answers {given.tolist()}; expected {expected.tolist()}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        here = Installation(scripts=Path(sys.executable).parent, folder=Path(scratch), variables=os.environ)
        sys.stdout.write(f"{smoke(here)}\n")
