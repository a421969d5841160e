from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from onnx import helper

from halfserve import Client, ClientError
from halfserve.protos import inference_pb2 as pb
from halfserve.protos.datatypes import DATATYPES
from halfserve.serve.benchmark import BenchmarkArgumentError, BenchmarkError, load_target
from halfserve.serve.benchmark.level import Load, ServerTotals
from halfserve.serve.benchmark.load.spec import LoadSpec
from halfserve.serve.benchmark.load_target import LoadTarget, RequestSettings, host_and_port
from halfserve.serve.benchmark.measurement import Measurement, measure
from halfserve.serve.client.channel_settings import Tls
from halfserve.serve.client.errors import DeadlineExceeded
from halfserve.serve.transports.nghttp2.server import Nghttp2Server
from tests.serve.client.cluster.cluster import answered, cluster_of, member
from tests.serve.client.scripted_server import ScriptedServer
from tests.serve.conftest import load_repository
from tests.serve.running_server import RunningServer, running_server

SHORT = Measurement(seconds=None, requests=12, warmup_s=0)


@pytest.fixture(scope="module")
def sharing_server(repository: Path) -> Iterator[RunningServer]:
    with running_server(lambda: load_repository(repository), shared_memory=True) as running:
        yield running


def region_of(target: LoadTarget) -> Path:
    _, request = target.requests[0]
    return Path("/dev/shm") / request.inputs[0].parameters["shared_memory_region"].string_param  # noqa: S108  (see shm_open)


def test_shared_memory_is_read_written_and_removed(sharing_server: RunningServer) -> None:
    options = RequestSettings(batch_size=3, shared_memory="system", given={"x": np.ones((3, 64), np.float16)})
    with LoadTarget(sharing_server.address, ["mlp"], options) as target:
        _, request = target.requests[0]
        assert not request.raw_input_contents
        region = region_of(target)
        (inside,) = target.client.infer_message(target.plain_requests[0]).raw_output_contents
        assert list(target.client.infer_message(request).raw_output_contents) == [b""]
        offset = request.outputs[0].parameters["shared_memory_offset"].int64_param
        assert region.read_bytes()[offset : offset + len(inside)] == inside
        level = measure(target.bench, Load(concurrency=4), SHORT)
    assert (level.requests, level.failed) == (12, 0)
    assert level.server is not None
    assert (level.server.requests, level.server.rows) == (12, 36)
    assert not region.exists()


def test_every_answer_has_room_in_shared_memory(sharing_server: RunningServer) -> None:
    texts = np.array([[b"a"], [b"a longer one than the first"]], object)
    shapes = {f"in_{row.wire}": [1] for row in DATATYPES if row.wire not in ("BYTES", "BF16")}
    options = RequestSettings(shared_memory="system", given={"in_BYTES": texts}, shapes=[shapes])
    with LoadTarget(sharing_server.address, ["echo_types"], options) as target:
        level = measure(target.bench, Load(concurrency=2), SHORT)
    assert (level.requests, level.tally.messages) == (12, {})


def test_longer_answers_have_room_without_a_batch_dimension(tmp_path: Path) -> None:
    folder = tmp_path / "found" / "1"
    folder.mkdir(parents=True)
    x, y = helper.make_tensor_value_info("x", 1, [100]), helper.make_tensor_value_info("y", 7, ["positive", 1])
    steps = (("Relu", "x", "r"), ("NonZero", "r", "places"), ("Transpose", "places", "y"))
    nodes = [helper.make_node(kind, [source], [result]) for kind, source, result in steps]
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [y]), opset_imports=[helper.make_opsetid("", 18)], ir_version=9
    )
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    (folder.parent / "config.pbtxt").write_text('name: "found"\nbackend: "onnxruntime"\nmax_batch_size: 0\n')
    with (
        running_server(lambda: load_repository(tmp_path), shared_memory=True) as running,
        LoadTarget(running.address, ["found"], RequestSettings(shared_memory="system")) as target,
    ):
        level = measure(target.bench, Load(concurrency=2), SHORT)
    assert (level.requests, level.tally.messages) == (12, {})


def test_without_a_device_its_memory_is_an_error(sharing_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_target, "cuda_driver", lambda: None)
    with pytest.raises(BenchmarkError, match="no CUDA device to share memory of; use --shared-memory system"):
        LoadTarget(sharing_server.address, ["mlp"], RequestSettings(shared_memory="cuda"))


def test_an_encrypted_server_is_loaded_too(repository: Path, tmp_path: Path) -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    options = RequestSettings(tls=Tls(authorities=tmp_path / "ca.pem"), metadata={"X-Caller": "tests"})
    with running_server(lambda: load_repository(repository), partial(Nghttp2Server, tls=context)) as encrypted:
        address = f"localhost:{encrypted.address.rpartition(':')[2]}"
        with LoadTarget(address, ["mlp"], options) as target:
            level = measure(target.bench, Load(concurrency=4), SHORT)
            assert target.generator.run(LoadSpec(concurrency=1, requests=1)).ended_early is None
    assert (level.requests, level.failed) == (12, 0)


def test_all_members_of_a_cluster_that_serve_the_model_are_loaded(repository: Path) -> None:
    with cluster_of(repository, 3) as running:
        served = [member(server.address) for server in running.servers[:2]]
        running.board.publish(*served, member(running.servers[2].address, models=["picky"]))
        with LoadTarget(running.address, ["mlp"], RequestSettings()) as target:
            assert target.notes == [f"the load goes to 2 of 3 members: {', '.join(one.grpc_address for one in served)}"]
            before = [answered(server) for server in running.servers]
            level = measure(target.bench, Load(concurrency=4), SHORT)
        assert (level.requests, level.failed) == (12, 0)
        found = [answered(server) - count for server, count in zip(running.servers, before, strict=True)]
        assert sum(found) == 12
        assert min(found[:2]) > 0
        assert found[2] == 0
        together = RequestSettings(given={"i": np.zeros((1, 1), np.int64)})
        with pytest.raises(BenchmarkArgumentError, match="no member of the cluster serves 'mlp' and 'picky' together"):
            LoadTarget(running.address, ["mlp", "picky"], together)
        with pytest.raises(BenchmarkArgumentError, match="share no memory"):
            LoadTarget(running.address, ["mlp"], RequestSettings(shared_memory="system"))


def test_several_models_take_turns(server: RunningServer) -> None:
    options = RequestSettings(given={"i": np.zeros((1, 1), np.int64)})
    with LoadTarget(server.address, ["mlp", "picky"], options) as target:
        assert [number for number, _ in target.requests[:4]] == [0, 1, 0, 1]
        assert target.versions == {"mlp": "3", "picky": "1"}
        level = measure(target.bench, Load(concurrency=2), SHORT)
        streamed = target.generator.run(LoadSpec(rate=1000, requests=4)).tally
    assert [one["requests"] for one in level.to_json()["models"]] == [6, 6]
    assert level.server is not None
    assert level.server.requests == 12
    assert [latencies.total for latencies in streamed.latencies] == [2, 2]


def test_shapes_take_turns(server: RunningServer) -> None:
    names = [f"in_{row.wire}" for row in DATATYPES if row.numpy is not None]
    shapes = [{name: [size] for name in names} for size in (2, 5)]
    with LoadTarget(server.address, ["echo_types"], RequestSettings(shapes=shapes)) as target:
        assert [list(request.inputs[0].shape) for _, request in target.requests[:3]] == [[1, 2], [1, 5], [1, 2]]
        assert target.versions == {"echo_types": "1"}


@pytest.mark.long
def test_until_stable_measures_windows_and_reads_the_counters_between_them(server: RunningServer) -> None:
    how = Measurement(seconds=0.25, until_stable=True, warmup_s=0)
    shown: list[float] = []
    with LoadTarget(server.address, ["mlp"], RequestSettings(zeros=True)) as target:
        level = measure(target.bench, Load(concurrency=2), how, lambda tally: shown.append(tally.seconds))
    assert level.stable is not None
    assert len(shown) >= 3
    assert 0 < level.tally.seconds < sum(shown) + 1e-9
    assert level.tally.seconds == pytest.approx(sum(window.seconds for window in level.windows[-3:]))
    assert level.server is not None
    assert level.server.requests > 0
    assert all("another client" not in line for line in level.doubts())


def test_a_server_too_busy_for_statistics_is_measured(server: RunningServer) -> None:
    def too_busy() -> None:
        raise DeadlineExceeded("no answer in time")

    with LoadTarget(server.address, ["mlp"], RequestSettings()) as target:
        level = measure(replace(target.bench, read_totals=too_busy), Load(concurrency=2), SHORT)
    assert (level.requests, level.server) == (12, None)


def test_the_counters_of_windows_are_those_of_the_windows_shown(server: RunningServer) -> None:
    readings = (ServerTotals(requests=2**n) for n in range(50))
    how = Measurement(seconds=0.05, until_stable=True, warmup_s=0)
    with LoadTarget(server.address, ["mlp"], RequestSettings()) as target:
        level = measure(replace(target.bench, read_totals=lambda: next(readings)), Load(concurrency=2), how)
    edges = len(level.windows)
    assert level.server == ServerTotals(requests=2**edges - 2 ** (edges - 3))


@pytest.mark.parametrize("asked", ["m", "alias"])
def test_only_the_counters_of_the_models_asked_count(asked: str) -> None:
    counted = pb.ModelStatisticsResponse()
    for name, count in (("m", 5), ("other", 70)):
        model = counted.model_stats.add(name=name, version="1", inference_count=count, execution_count=count)
        model.inference_stats.success.count = count
    metadata = pb.ModelMetadataResponse(name="m", versions=["1"])
    metadata.inputs.add(name="x", datatype="FP32", shape=[2])
    answers: dict[str, list[Any]] = {
        "ModelMetadata": [metadata],
        "ModelConfig": [pb.ModelConfigResponse()],
        "ModelInfer": [pb.ModelInferResponse(model_name="m", model_version="1")],
        "ModelStatistics": [counted],
    }
    scripted = ScriptedServer(answers=answers)
    try:
        with LoadTarget(scripted.address, [asked, asked], RequestSettings()) as target:
            totals = target.totals()
    finally:
        scripted.stop()
    assert totals is not None
    assert (totals.requests, totals.rows) == (5, 5)


@pytest.mark.parametrize("until_stable", [False, True])
def test_counters_reset_during_a_load_are_dropped(server: RunningServer, until_stable: bool) -> None:
    counters = (ServerTotals(requests=100, rows=100 + n, executions=100 - n) for n in range(50))
    how = Measurement(seconds=0.05, until_stable=True, warmup_s=0) if until_stable else SHORT
    with LoadTarget(server.address, ["mlp"], RequestSettings()) as target:
        level = measure(replace(target.bench, read_totals=lambda: next(counters)), Load(concurrency=2), how)
    assert level.server is None
    assert level.to_json()["mean_batch_size"] is None


def test_unknown_input_names_are_refused(server: RunningServer) -> None:
    with pytest.raises(BenchmarkArgumentError, match="model 'mlp' or 'picky' has no input 'z'; expected one of i, x"):
        LoadTarget(server.address, ["mlp", "picky"], RequestSettings(shapes=[{"z": [1]}]))


@pytest.mark.parametrize("address", ["", "host", "host:0", "host:x", ":1", "http://host:1", "host:70000"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(BenchmarkArgumentError, match="the address must be HOST:PORT, such as 127.0.0.1:8001, not "):
        host_and_port(address)


def test_addresses_have_two_parts() -> None:
    assert host_and_port("[::1]:8001") == ("::1", 8001)
    assert host_and_port("gpu.example.org:1") == ("gpu.example.org", 1)


def test_closing_closes_the_connection(server: RunningServer) -> None:
    target = LoadTarget(server.address, ["mlp"], RequestSettings())
    target.close()
    assert isinstance(target.client, Client)
    with pytest.raises(ClientError, match="this client is closed"):
        target.totals()
