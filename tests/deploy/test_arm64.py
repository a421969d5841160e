"""The wheel for any platform, installed with what it needs for an emulated Arm64 processor, answers as this machine does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest

from deploy.release.archives import build_pure
from deploy.release.environment import Environment
from deploy.release.smoke import Installation, smoke
from halfserve import Client
from tests.deploy.emulated_arm64 import PROCESSOR, arm64_python, can_emulate_arm64
from tests.models import mlp_weights, save_text
from tests.ports import unused_port
from tests.serve.backends.python.python_models import save_python_model

CHECKOUT = Path(__file__).resolve().parents[2]
WITH_FLOAT16 = "neoverse-n1"  # Graviton 2, which has arithmetic in float16
ROWS_TO_ROWS = """
input { name: "x" data_type: TYPE_FP32 dims: [ -1, 64 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1, 64 ] }
"""
IN_FLOAT16 = 'parameters { key: "halfserve.cpu_precision" value { string_value: "float16" } }\n'
MLP = "(float[n, 64] x) => (float[n, 10] y) { h = MatMul(x, first) a = Relu(h) y = MatMul(a, second) }"
# The sum is more than float16 holds, the answer is not.
QUARTER_OF_TWO = "(float16[n, 4] x) => (float16[n, 4] y) { sum = Add(x, x) y = Mul(sum, quarter) }"
LARGE = 60_000.0
ALONE = f"""
import numpy as np, onnxruntime as ort, sys
session = ort.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
print(session.run(None, {{"x": np.full((1, 4), {LARGE}, np.float16)}})[0].max())
"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500), can_emulate_arm64]


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    folder = tmp_path_factory.mktemp("arm64")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UV_CONSTRAINT", f"{os.environ.get('UV_CONSTRAINT', '')} {CHECKOUT / 'constraints.txt'}")
        _, wheel = build_pure(CHECKOUT, folder)
        environment = Environment(folder / "environment", str(arm64_python(folder)))
        environment.install(wheel, "convert", "openvino")
    return on(WITH_FLOAT16, environment.installation)


@pytest.fixture
def x86(tmp_path: Path) -> Installation:
    return Installation(scripts=Path(sys.executable).parent, folder=tmp_path, variables=os.environ)


def on(processor: str, installation: Installation) -> Installation:
    """The installation on a processor, whose trials no other run has remembered."""
    own = {PROCESSOR: processor, "HOME": str(installation.folder / processor)}
    return replace(installation, variables={**installation.variables, **own})


@contextmanager
def served(installation: Installation, repository: Path, *options: str) -> Iterator[tuple[Client, str]]:
    """A client of gRPC, and the address of REST."""
    port = unused_port()
    ports = ("--http-port", str(port), "--metrics-port", "0")
    with installation.served(repository, *ports, *options) as (address, _), Client(address) as client:
        yield client, f"http://127.0.0.1:{port}/v2"


def saved_mlp(path: Path) -> Path:
    first, second = (weights.astype(np.float32) for weights in mlp_weights())
    return save_text(path, MLP, first=first, second=second)


def rest(url: str, body: object = None) -> Any:
    request = Request(url, None if body is None else json.dumps(body).encode())  # noqa: S310  (our own server's)
    with urlopen(request, timeout=60) as answer:  # noqa: S310  (as above)
        return json.load(answer)


def answers(installation: Installation, repository: Path, rows: np.ndarray[Any, Any]) -> dict[str, Any]:
    """What two processes answer over gRPC and over REST, by model."""
    given = {"name": "x", "datatype": "FP32", "shape": rows.shape, "data": rows.tolist()}
    found: dict[str, Any] = {}
    options = ("--processes", "2", "--trust-python-models", "--cpu-precision", "float32")
    with served(installation, repository, *options) as (client, base):
        for name in ("float32", "half", "twice"):
            (output,) = client.infer(name, {"x": rows}).values()
            (sent,) = rest(f"{base}/models/{name}/infer", {"inputs": [given]})["outputs"]
            found[name] = output.dtype, output.tolist(), sent["data"]
    return found


def test_arm64_converts_and_two_processes_answer_as_those_of_x86(arm: Installation, x86: Installation, tmp_path: Path) -> None:
    assert "converts, serves" in smoke(arm, measures=False)
    repository = tmp_path / "models"
    source = saved_mlp(repository / "float32/1/model.onnx")
    arm.halfserve("convert", str(source), "--repository", str(repository), "--name", "half")
    save_python_model(repository, "twice", config=ROWS_TO_ROWS)
    rows = np.random.default_rng(0).standard_normal((8, 64), np.float32)
    assert answers(arm, repository, rows) == answers(x86, repository, rows)  # bit for bit


def test_arm64_computes_in_float32_what_was_not_proved(arm: Installation, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    unsaid = save_text(repository / "unsaid/1/model.onnx", QUARTER_OF_TWO, quarter=np.float16(0.25))
    shutil.copytree(repository / "unsaid", repository / "unproved")
    (repository / "unproved/config.pbtxt").write_text(IN_FLOAT16)
    # The negative control: what the runtime does with the file by itself.
    alone = [str(arm.scripts / "python"), "-c", ALONE, str(unsaid)]
    assert subprocess.run(alone, env=arm.variables, capture_output=True, text=True, check=True).stdout.strip() == "inf"
    with served(arm, repository, "--keep-going") as (client, base):
        assert np.all(client.infer("unsaid", {"x": np.full((1, 4), LARGE, np.float16)})["y"] == LARGE / 2)
        assert rest(f"{base}/models/unsaid")["properties"]["halfserve.precision"] == "fp32 (the fp16 model, upcast)"
        reasons = {model["name"]: model["reason"] for model in rest(f"{base}/repository/index", {})}
        assert "no verdict says that this is accurate enough" in reasons["unproved"]
