"""The demo's pipeline in small, and the model it makes asked through grpcio and through tritonclient."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from google.protobuf import text_format

from halfserve import read_certificate
from halfserve.amp_core.checkpoint import load_checkpoint
from halfserve.examples.digits.report import LEVEL_HEADINGS, PRECISION_HEADINGS, DemoResult, precision_rows
from halfserve.protos import inference_pb2 as pb
from halfserve.protos.model_config_pb2 import ModelConfig

Array = np.ndarray[Any, Any]
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
HALFSERVE = [sys.executable, "-m", "halfserve"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a demo that trained for a few epochs, and what it printed."""
    out = tmp_path_factory.mktemp("demo")
    options = ["--out", str(out), "--epochs", "4", "--seconds", "0.2", "--concurrency", "1,4", "--json"]
    # Its standard error goes to pytest's, which shows it where the demo fails or runs out of time.
    done = subprocess.run([*HALFSERVE, "demo", *options], stdout=subprocess.PIPE, text=True, check=True)
    return out, json.loads(done.stdout)


@pytest.fixture(scope="module")
def address(demo: tuple[Path, dict[str, Any]]) -> Iterator[str]:
    """A server on the demo's repository."""
    command = [*HALFSERVE, "serve", str(demo[0] / "repository"), "--grpc-port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        yield f"127.0.0.1:{ready['grpc_port']}"
        process.terminate()
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def held_out(demo: tuple[Path, dict[str, Any]]) -> tuple[Array, Array]:
    """Thirty-two held-out images, [32, 1, 8, 8], and the fp32 model's logits for them, [32, 10]."""
    checkpoint = load_checkpoint(demo[0] / "training" / "checkpoint.pt")
    _, samples = checkpoint.build_data()
    images = torch.stack([samples[i][0] for i in range(32)])
    with torch.no_grad():
        logits = checkpoint.build_model()(images)
    return images.numpy(), logits.numpy()


def test_the_summary_says_what_was_promised(demo: tuple[Path, dict[str, Any]]) -> None:
    _, summary = demo
    assert summary["accuracy"]["fp32"] > 0.9
    assert summary["accuracy"]["fp16"] == pytest.approx(summary["accuracy"]["fp32"], abs=0.005)
    assert summary["accuracy"]["served"] == pytest.approx(summary["accuracy"]["fp32"], abs=0.005)
    assert summary["argmax_agreement"] >= 0.995
    assert summary["non_finite"] == 0
    assert summary["model_bytes"]["fp16"] < 0.65 * summary["model_bytes"]["fp32"]
    assert [level["concurrency"] for level in summary["levels"]] == [1, 4]
    assert all(level["requests_per_second"] > 0 for level in summary["levels"])


def test_every_file_is_there_and_says_the_same(demo: tuple[Path, dict[str, Any]]) -> None:
    out, summary = demo
    version = out / "repository" / "digits" / "1"
    certificate = read_certificate((version / "certificate.json").read_bytes())
    assert certificate.passed
    assert certificate.onnx_bytes == (version / "model.onnx").stat().st_size == summary["model_bytes"]["fp16"]
    config = text_format.Parse((version.parent / "config.pbtxt").read_text(), ModelConfig())
    assert [list(config.input[0].dims), list(config.output[0].dims)] == [[1, 8, 8], [10]]
    bench = json.loads((out / "bench.json").read_text())
    assert [level["errors"] for level in bench["levels"]] == [0, 0]
    lines = [json.loads(line) for line in (out / "training" / "train.jsonl").read_text().splitlines()]
    assert sum("accuracy" in line for line in lines) == 4


def test_the_readme_shows_the_lines_that_the_demo_prints(demo: tuple[Path, dict[str, Any]]) -> None:
    out, summary = demo
    result = DemoResult.read(
        training=out / "training",
        certificate=out / "repository" / "digits" / "1" / "certificate.json",
        bench=out / "bench.json",
        served_accuracy=summary["accuracy"]["served"],
        processor=summary["processor"],
        precisions=summary["precisions"],
        no_bf16=summary["no_bf16"],
    )
    shown = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    for line in [*(name for name, _ in precision_rows(result)), *LEVEL_HEADINGS, *PRECISION_HEADINGS]:
        assert line in shown


def test_the_report_stands_alone(demo: tuple[Path, dict[str, Any]]) -> None:
    page = (demo[0] / "report.html").read_text()
    assert page.count("<svg") == 9
    assert "Within budget" in page
    assert not any(word in page for word in ("src=", "href=", "nan,", "undefined"))


def test_bf16_has_a_row_or_a_reason(demo: tuple[Path, dict[str, Any]]) -> None:
    page, summary = (demo[0] / "report.html").read_text(), demo[1]
    has_row = any("bf16" in served["file"] for served in summary["precisions"])
    assert has_row == (summary["no_bf16"] == "")
    assert ("There is no row for bf16: this processor" in page) != has_row


def test_grpcio_gets_the_fp32_models_answers(address: str, held_out: tuple[Array, Array]) -> None:
    images, logits = held_out
    request = pb.ModelInferRequest(model_name="digits", id="e2e", raw_input_contents=[images.tobytes()])
    request.inputs.add(name="image", datatype="FP32", shape=images.shape)
    with grpc.insecure_channel(address) as channel:
        path = "/inference.GRPCInferenceService/ModelInfer"
        rpc = channel.unary_unary(path, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString)
        response = rpc(request, timeout=60)
    assert (response.model_name, response.model_version, response.id) == ("digits", "1", "e2e")
    answer = np.frombuffer(response.raw_output_contents[0], np.float32).reshape(response.outputs[0].shape)
    check(answer, logits)


def test_tritonclient_gets_the_fp32_models_answers(address: str, held_out: tuple[Array, Array]) -> None:
    images, logits = held_out
    with triton.InferenceServerClient(address) as client:
        futures = []
        for image in images:
            tensor = triton.InferInput("image", [1, 1, 8, 8], "FP32").set_data_from_numpy(image[None])
            futures.append(client.infer("digits", [tensor]))
        check(np.concatenate([result.as_numpy("output") for result in futures]), logits)


def check(answer: Array, logits: Array) -> None:
    assert answer.dtype == np.float32
    assert (answer.argmax(axis=1) == logits.argmax(axis=1)).mean() >= 0.995
    np.testing.assert_allclose(answer, logits, atol=0.01 * float(np.abs(logits).max()))
