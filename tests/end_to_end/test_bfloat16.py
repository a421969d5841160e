"""A module exported with a proof in bfloat16, and served in bfloat16 and in the faster precision."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from halfserve import Client
from halfserve.serve.backends.openvino.fitness import computed_halves

pytest.importorskip("openvino")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif("bf16" not in computed_halves(), reason="the processor has no bf16 arithmetic"),
]
HALFSERVE = [sys.executable, "-m", "halfserve"]
TOKENS, FEATURES, CLASSES = 8, 16, 10
BUDGET = 0.04  # the usual scaled error for bfloat16


def network() -> nn.Module:
    """A transformer: [N, 8, 16] -> [N, 10]; `halfserve export` calls it too."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, activation="gelu")
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(FEATURES, 64), encoder, nn.Flatten(), nn.Linear(TOKENS * 64, CLASSES)).eval()


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def written(request: pytest.FixtureRequest) -> str:
    """The type of the exported file; one in float16 is proved in bfloat16 besides."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, written: str) -> Path:
    """A repository with the network in half precision, as version 1 of the model `net`."""
    folder = tmp_path_factory.mktemp("bfloat16")
    np.savez(folder / "samples.npz", input=samples(256))
    options = ["--samples", str(folder / "samples.npz"), "--repository", str(folder / "models"), "--name", "net"]
    command = [*HALFSERVE, "export", f"{__name__}:network", *options, "--dtype", written, "--json", "--precisions", "bfloat16"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    certificate = json.loads(done.stdout)["certificate"]
    assert (certificate["passed"], certificate["precision"]) == (True, written)
    assert written == "bfloat16" or certificate["precisions"]["bfloat16"]["passed"]
    return folder / "models"


def samples(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal((count, TOKENS, FEATURES)).astype(np.float32)


@pytest.mark.parametrize("asked", ["bfloat16", "auto"])
def test_a_model_proved_in_bfloat16_is_served_as_asked(repository: Path, written: str, tmp_path: Path, asked: str) -> None:
    options = ["--cpu", "--grpc-port", "0", "--http-port", "0", "--cpu-precision", asked, "--json"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}  # a trial of another test is not remembered
    with (
        (tmp_path / "log").open("w+") as log,
        subprocess.Popen(
            [*HALFSERVE, "serve", str(repository), *options], stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        with Client(f"127.0.0.1:{ready['grpc_port']}") as client:
            answer = client.infer("net", {"input": samples(32)})["output"]
            about = client.model_config("net").parameters
            properties = client.model_metadata("net").properties
        process.terminate()
        assert process.wait(60) == 0
        log.seek(0)
        said = log.read()
    with torch.no_grad():
        expected = network()(torch.from_numpy(samples(32))).numpy()
    assert 0 < np.abs(answer - expected).max() <= BUDGET * np.abs(expected).max()
    ran = (about["halfserve.provider"].string_value, about["halfserve.precision"].string_value)
    (model,) = ready["models"]
    assert (model["provider"], model["precision"]) == ran
    assert (properties["halfserve.provider"], properties["halfserve.precision"]) == ran
    assert model["measured"] == properties["halfserve.measured"] == about["halfserve.measured"].string_value
    assert model["measured"] in said
    assert "the answers to recorded samples differ by 0.0" in said
    if "is computed in bfloat16 (OpenVINO in bfloat16" in said:
        assert ran == ("OpenVINO on cpu", "bf16" if written == "bfloat16" else "bf16 (the fp16 model)")
        assert "OpenVINO bf16=" in about["halfserve.nodes"].string_value
    else:
        assert asked == "auto", said
        assert "is computed in float32 by ONNX Runtime: float32 is faster (OpenVINO in bfloat16" in said
        assert ran == ("CPUExecutionProvider", f"fp32 (the {'bf16' if written == 'bfloat16' else 'fp16'} model, upcast)")
