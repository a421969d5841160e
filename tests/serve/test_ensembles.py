"""Ensembles in a repository on disk, asked by Triton's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException, shared_memory

from halfserve.cli import main
from halfserve.serve.http.http_options import HttpOptions
from halfserve.serve.model_control.control_options import ControlMode
from halfserve.serve.startup_report import StartupReport, print_text
from tests.models import mlp_weights, save_mlp, save_model
from tests.serve.engine.ensembles.configurations import ensemble, step
from tests.serve.ensemble_folders import CHAIN, save_add, save_cast, save_ensemble, save_texts
from tests.serve.http.running_http import running_http
from tests.serve.model_control.controlled import controlled_server, lines
from tests.serve.running_server import RunningServer
from tests.serve.runtimes import RUNTIMES

FOUR = np.arange(4, dtype=np.float32)
# Each output of the ensemble comes another way.
DIAMOND = ensemble(
    step("one", "x=x", "y=left"),
    step("ten", "x=x", "y=right"),
    step("ten", "x=left", "y=far"),
    step("one", "x=right", "y=near"),
    input="x:FP32:4",
    output="far:FP32:4 near:FP32:4 left:FP32:4",
)
CASTS = ensemble(step("cast", "x=x", "y=h"), step("mlp", "x=h", "y=out"), input="x:FP32:64", output="out:FP16:10")
TEXTS = ensemble(
    step("texts", "x=x", "y=t"), step("texts", "x=t", "y=out count=n"), input="x:STRING:-1", output="out:STRING:-1 n:INT64:1"
)
NESTED = ensemble(step("chain", "x=x", "out=t"), step("chain", "x=t", "out=out"), input="x:FP32:4", output="out:FP32:4")
UNMET = ensemble(step("cast", "x=x", "y=h"), step("one", "x=h", "y=out"), input="x:FP32:4", output="out:FP32:4")


@pytest.fixture(scope="module", params=RUNTIMES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("ensembles")
    save_add(root / "one", 1)
    save_add(root / "ten", 10)
    output = 'output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" }'
    (root / "ten" / "config.pbtxt").write_text(f"max_batch_size: 8 {output}")
    (root / "ten" / "labels.txt").write_text("a\nb\nc\nd\n")
    save_cast(root / "cast")
    save_texts(root / "texts")
    save_mlp(root / "mlp" / "1" / "model.onnx")
    save_ensemble(root / "a_nested", NESTED, has_version=False)  # before its steps, by name
    save_ensemble(root / "casts", CASTS)
    save_ensemble(root / "chain", CHAIN)
    save_ensemble(root / "diamond", DIAMOND)
    save_ensemble(root / "chain_of_texts", TEXTS)
    save_ensemble(root / "unmet", UNMET)
    made = RUNTIMES[request.param]()
    with controlled_server(root, ControlMode.NONE, keep_going=True, shared_memory=True, runtime=made) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as opened:
        yield opened


def sent(array: Any, datatype: str = "FP32") -> triton.InferInput:
    return triton.InferInput("x", list(array.shape), datatype).set_data_from_numpy(array)


@pytest.mark.parametrize(("model", "output"), [("chain", "out"), ("a_nested", "out"), ("diamond", "far")])
def test_classes_have_the_labels_of_the_step_that_computes_them(
    client: triton.InferenceServerClient, model: str, output: str
) -> None:
    wanted = triton.InferRequestedOutput(output, class_count=2)
    classes = client.infer(model, [sent(FOUR[None])], outputs=[wanted]).as_numpy(output)
    assert [text.split(b":")[1:] for text in classes.ravel()] == [[b"3", b"d"], [b"2", b"c"]]


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_chain_answers_what_its_models_answer_one_after_the_other(client: triton.InferenceServerClient, rows: int) -> None:
    x = np.arange(4 * rows, dtype=np.float32).reshape(rows, 4)
    assert client.infer("chain", [sent(x)]).as_numpy("out").tolist() == (x + 11).tolist()
    assert client.infer("a_nested", [sent(x)]).as_numpy("out").tolist() == (x + 22).tolist()


def test_outputs_come_from_several_steps_and_in_the_wanted_order(client: triton.InferenceServerClient) -> None:
    whole = client.infer("diamond", [sent(FOUR[None])])
    assert {name: whole.as_numpy(name)[0, 0] for name in ("far", "near", "left")} == {"far": 11, "near": 11, "left": 1}
    some = client.infer("diamond", [sent(FOUR[None])], outputs=[triton.InferRequestedOutput(name) for name in ("left", "far")])
    assert [output.name for output in some.get_response().outputs] == ["left", "far"]


def test_types_change_from_step_to_step(client: triton.InferenceServerClient) -> None:
    x = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    first, second = (matrix.astype(np.float32) for matrix in mlp_weights())
    expected = np.maximum(x.astype(np.float16).astype(np.float32) @ first, 0) @ second
    answer = client.infer("casts", [sent(x)]).as_numpy("out")
    assert answer.dtype == np.float16
    assert np.allclose(answer, expected, atol=1e-2)


def test_types_that_do_not_meet_are_refused(server: RunningServer) -> None:
    (entry,) = [line for line in lines(server) if line[0] == "unmet"]
    assert entry[2:] == (
        "UNAVAILABLE",
        (
            "unmet/config.pbtxt: step 2 (model 'one'): input 'x' is FP32, but the tensor 'h' is FP16, as output 'y' of step 1 "
            "(model 'cast'); put a step that casts between them"
        ),
    )


@pytest.mark.parametrize("size", [2, 20_000])
def test_texts_are_passed_on(client: triton.InferenceServerClient, size: int) -> None:
    """Large texts are parsed on the thread of the first step."""
    x = np.array([["grüße", "x" * size]], dtype=object)
    answer = client.infer("chain_of_texts", [sent(x, "BYTES")])
    assert [text.decode() for text in answer.as_numpy("out")[0]] == x[0].tolist()
    assert answer.as_numpy("n").tolist() == [[2]]


def test_inputs_and_outputs_lie_in_shared_memory(client: triton.InferenceServerClient) -> None:
    region = shared_memory.create_shared_memory_region("pipe", "/halfserve_test_ensembles", 32)
    try:
        shared_memory.set_shared_memory_region(region, [FOUR])
        client.register_system_shared_memory("pipe", "/halfserve_test_ensembles", 32)
        x, out = triton.InferInput("x", [1, 4], "FP32"), triton.InferRequestedOutput("out")
        x.set_shared_memory("pipe", 16)
        out.set_shared_memory("pipe", 16, 16)
        for _ in range(2):  # the second one is not parsed
            client.infer("chain", [x], outputs=[out])
            assert shared_memory.get_contents_as_numpy(region, np.float32, [1, 4], offset=16).tolist() == [(FOUR + 11).tolist()]
    finally:
        client.unregister_system_shared_memory("pipe")
        shared_memory.destroy_shared_memory_region(region)


def test_a_batch_beyond_the_ensembles_size_is_refused(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="the batch size is 9, expected 1 to 8"):
        client.infer("chain", [sent(np.zeros((9, 4), np.float32))])


def test_what_the_server_says_of_an_ensemble(
    server: RunningServer, client: triton.InferenceServerClient, capsys: pytest.CaptureFixture[str]
) -> None:
    provider = server.call(lambda: server.core.model("one").provider)
    on_cpu = f"{provider}, fp32"
    assert client.is_model_ready("chain")
    assert client.get_model_metadata("chain").platform == "ensemble"
    parameters = client.get_model_config("casts").config.parameters
    steps = [f"cast/1  {on_cpu} (the fp16 model, upcast)", f"mlp/1  {on_cpu} (the fp16 model, upcast)"]
    assert parameters["halfserve.steps"].string_value.splitlines() == steps
    nested = server.call(lambda: server.core.model("a_nested"))
    print_text(StartupReport(models=[nested], host="", grpc_port=1, seconds=1), "http")
    assert capsys.readouterr().out.splitlines()[:5] == [
        f"a_nested/1  {on_cpu}, batches of up to 8",
        *[f"  chain/1 > {name}/1  {on_cpu}" for name in ("one", "ten", "one", "ten")],
    ]
    with pytest.raises(SystemExit):
        main(["models", "casts", "--address", server.address, "--json"])
    (row,) = json.loads(capsys.readouterr().out)["models"]
    assert (row["platform"], row["provider"], row["steps"]) == ("ensemble", provider, steps)
    with pytest.raises(SystemExit):
        main(["models", "casts", "--address", server.address])
    assert "mlp/1" in capsys.readouterr().out


def test_statistics_of_the_whole_and_of_each_step(client: triton.InferenceServerClient) -> None:
    def counts(name: str) -> tuple[int, int, int]:
        (stats,) = client.get_inference_statistics(name).model_stats
        return stats.inference_stats.success.count, stats.inference_count, stats.inference_stats.compute_infer.count

    before = {name: counts(name) for name in ("chain", "one", "ten")}
    client.infer("chain", [sent(np.zeros((2, 4), np.float32))])
    after = {name: counts(name) for name in before}
    assert {name: tuple(np.subtract(after[name], before[name])) for name in before} == dict.fromkeys(before, (1, 2, 1))


def test_the_page_and_the_metrics_have_the_ensemble(server: RunningServer) -> None:
    with (
        running_http(server, HttpOptions(port=0)) as rest,
        httpx.Client(base_url=f"http://127.0.0.1:{rest.port}", timeout=60) as http,
    ):
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0, 1, 2, 3]}]}
        assert http.post("/v2/models/chain/infer", json=body).json()["outputs"][0]["data"] == [11, 12, 13, 14]
        assert 'nv_inference_request_success{model="chain",version="1"}' in http.get("/metrics").text
        shown = {entry["name"]: entry for entry in json.loads(http.get("/ui/state").text)["models"]}
        assert (shown["chain"]["answers"], shown["chain"]["copies"]) == (True, [])
        assert [line.split()[0] for line in shown["chain"]["steps"]] == ["one/1", "ten/1"]
        assert shown["unmet"]["state"] == "UNAVAILABLE"


def test_reshapes_hold_for_steps_and_for_the_whole(tmp_path: Path) -> None:
    fp32: int = TensorProto.FLOAT
    squares: list[int | str] = ["batch", 2, 2]
    nodes = [helper.make_node("Transpose", ["x"], ["y"], perm=[0, 2, 1])]
    tensors = [(name, fp32, squares) for name in "xy"]
    save_model(tmp_path / "turn" / "1" / "model.onnx", nodes, tensors[:1], tensors[1:])
    flat = "data_type: TYPE_FP32 dims: 4 reshape { shape: [ 2, 2 ] }"
    (tmp_path / "turn" / "config.pbtxt").write_text(
        f'max_batch_size: 8 input {{ name: "x" {flat} }} output {{ name: "y" {flat} }}'
    )
    save_add(tmp_path / "one", 1)
    shown = 'output { name: "out" data_type: TYPE_FP32 dims: [ 2, 2 ] reshape { shape: 4 } }'
    steps = (step("one", "x=x", "y=t"), step("turn", "x=t", "y=u"), step("one", "x=u", "y=out"))
    save_ensemble(tmp_path / "pipe", ensemble(*steps, input="x:FP32:4", output="", more=shown))
    with controlled_server(tmp_path, ControlMode.NONE) as server, triton.InferenceServerClient(server.address) as client:
        answer = client.infer("pipe", [sent(np.stack([FOUR, FOUR + 10]))]).as_numpy("out")
        assert answer.tolist() == [[[2, 4], [3, 5]], [[12, 14], [13, 15]]]


def test_a_repository_with_ensembles_that_need_each_other_is_refused(tmp_path: Path) -> None:
    save_ensemble(tmp_path / "left", ensemble(step("right", "x=x", "out=out")))
    save_ensemble(tmp_path / "right", ensemble(step("left", "x=x", "out=out")))
    with controlled_server(tmp_path, ControlMode.NONE, keep_going=True) as server:
        assert [line[3] for line in lines(server)] == [
            "left/config.pbtxt: ensembles need each other: 'left' -> 'right' -> 'left'; remove one of the steps",
            "right/config.pbtxt: ensembles need each other: 'right' -> 'left' -> 'right'; remove one of the steps",
        ]
