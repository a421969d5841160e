"""The response cache on real servers, as Triton's clients see it."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper
from tritonclient.utils import shared_memory as shm

from halfserve.serve.engine.caching.caching_scheduler import cache_answers
from halfserve.serve.engine.caching.response_cache import ResponseCache
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.model import Model
from halfserve.serve.model_control.control_options import ControlMode
from halfserve.serve.protocol.rpc import Role
from halfserve.serve.protocol.service import INFER_PATH
from halfserve.serve.security.security_options import SecurityOptions
from halfserve.serve.security.tokens import new_token
from tests.models import save_mlp, save_model, save_table
from tests.serve.conftest import load_repository
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.model_control.controlled import control
from tests.serve.running_server import RunningServer, running_server
from tests.serve.security.guarded import WATCH_S, bearer, call, guarded_server, infer_request, write_tokens
from tests.serve.test_server import serving

ENABLED = "response_cache { enable: true }"
PIPE = """
platform: "ensemble"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP16 dims: 64 }
output { name: "out" data_type: TYPE_FP16 dims: 10 }
ensemble_scheduling { step { model_name: "mlp" input_map { key: "x" value: "x" } output_map { key: "y" value: "out" } } }
"""


@contextmanager
def caching(repository: Path, limit_bytes: int = 2**20, **how: Any) -> Iterator[tuple[RunningServer, Any]]:
    """A server on a repository, and Triton's client of it."""

    def models() -> list[Model]:
        cache, loaded = ResponseCache(limit_bytes), load_repository(repository)
        for model in loaded:
            cache_answers(model, cache)
        return loaded

    with running_server(models, **how) as server, triton.InferenceServerClient(server.address) as client:
        yield server, client


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    (tmp_path / "mlp" / "config.pbtxt").write_text(f"max_batch_size: 8 {ENABLED}")
    return tmp_path


def x_of(values: Any) -> list[Any]:
    x = np.full((1, 64), values, np.float16)
    return [triton.InferInput("x", list(x.shape), "FP16").set_data_from_numpy(x)]


def statistics(client: Any, name: str = "mlp") -> tuple[int, int, int, int]:
    """Hits, misses, answers, rows that were computed."""
    (told,) = client.get_inference_statistics(name).model_stats
    stats = told.inference_stats
    return stats.cache_hit.count, stats.cache_miss.count, stats.success.count, told.inference_count


def test_equal_requests_get_the_computed_answer(mlp: Path) -> None:
    with caching(mlp) as (_, client):
        answers: dict[int, list[bytes]] = {}
        for value in (1, 2, 1, 1, 2, 3):
            result = client.infer("mlp", x_of(value), request_id=str(len(answers)))
            answers.setdefault(value, []).append(result.as_numpy("y").tobytes())
        assert [len(set(of)) for of in answers.values()] == [1, 1, 1]
        assert len(set.union(*map(set, answers.values()))) == 3
        assert statistics(client) == (3, 3, 6, 3)


def test_the_second_equal_request_of_several_inputs_is_a_hit(tmp_path: Path) -> None:
    pair: list[int | str] = ["batch", 2]
    save_model(
        tmp_path / "two" / "1" / "model.onnx",
        [helper.make_node("Add", ["x", "w"], ["y"])],
        [("x", TensorProto.FLOAT, pair), ("w", TensorProto.FLOAT, pair)],
        [("y", TensorProto.FLOAT, pair)],
    )
    (tmp_path / "two" / "config.pbtxt").write_text(ENABLED)
    inputs = [triton.InferInput(n, [1, 2], "FP32").set_data_from_numpy(np.ones((1, 2), np.float32)) for n in ("x", "w")]
    with caching(tmp_path) as (_, client):
        for hits in range(3):
            assert client.infer("two", inputs).as_numpy("y").tolist() == [[2, 2]]
            assert statistics(client, "two")[:2] == (hits, 1)
        for hits in range(3, 5):  # parsed at first, and matched with the request before at the second time
            assert client.infer("two", inputs[::-1]).as_numpy("y").tolist() == [[2, 2]]
            assert statistics(client, "two")[:2] == (hits, 1)


@pytest.mark.parametrize(("own", "steps"), [(True, False), (False, True), (True, True)])
def test_an_ensemble_answers_from_its_own_cache_or_that_of_its_steps(mlp: Path, own: bool, steps: bool) -> None:
    (mlp / "mlp" / "config.pbtxt").write_text(f"max_batch_size: 8 {ENABLED if steps else ''}")
    (mlp / "pipe").mkdir()
    (mlp / "pipe" / "config.pbtxt").write_text(PIPE + (ENABLED if own else ""))
    with running_server(list) as server, triton.InferenceServerClient(server.address) as client:
        controlling = server.call(lambda: control(server.core, mlp, ControlMode.NONE))
        server.call(lambda: setattr(server.core, "response_cache", ResponseCache(2**20)))
        server.run(controlling.start())
        first, second = (client.infer("pipe", x_of(1)).as_numpy("out").tobytes() for _ in range(2))
        assert first == second
        assert statistics(client, "pipe")[:3] == ((1, 1, 2) if own else (0, 0, 2))
        assert statistics(client)[:3] == ((0, 1, 1) if own and steps else (1, 1, 2) if steps else (0, 0, 1))
        server.call(controlling.close)


def test_an_answer_keeps_its_own_id_classes_and_outputs(mlp: Path) -> None:
    with caching(mlp) as (_, client):
        computed = client.infer("mlp", x_of(1), request_id="first")
        hit = client.infer("mlp", x_of(1), request_id="second")
        best = client.infer("mlp", x_of(1), outputs=[triton.InferRequestedOutput("y", class_count=2)])
        assert (computed.get_response().id, hit.get_response().id) == ("first", "second")
        index = int(np.argmax(computed.as_numpy("y")))
        assert best.as_numpy("y")[0, 0].decode().endswith(f":{index}")
        assert statistics(client)[:2] == (2, 1)


def test_hits_are_written_into_each_clients_shared_memory(mlp: Path) -> None:
    name = "halfserve_test_cache"
    with caching(mlp, shared_memory=True) as (_, client):
        handle = shm.create_shared_memory_region(name, f"/{name}", 148)
        try:
            client.register_system_shared_memory(name, f"/{name}", 148)
            x_shared, y_shared = triton.InferInput("x", (1, 64), "FP16"), triton.InferRequestedOutput("y")
            x_shared.set_shared_memory(name, 128)
            y_shared.set_shared_memory(name, 20, offset=128)
            for value in (1, 2, 1):
                sent = client.infer("mlp", x_of(value)).as_numpy("y")
                shm.set_shared_memory_region(handle, [np.full((1, 64), value, np.float16), np.zeros(10, np.float16)])
                client.infer("mlp", [x_shared], outputs=[y_shared])
                np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.float16, [1, 10], offset=128), sent)
            assert statistics(client)[:2] == (4, 2)
        finally:
            client.unregister_system_shared_memory()
            shm.destroy_shared_memory_region(handle)


def test_a_remarked_answer_and_an_error_are_computed_each_time(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    save_table(folder / "1" / "model.onnx", np.float16)
    save_table(folder / "1" / "fp32" / "model.onnx", np.float32)
    entries = {"halfserve.precision_guard": "fallback", "halfserve.fp32_twin": "fp32/model.onnx"}
    parameters = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in entries.items()
    )
    (folder / "config.pbtxt").write_text(f"max_batch_size: 8 {ENABLED}\n{parameters}")
    with caching(tmp_path) as (_, client):

        def ask(index: int) -> Any:
            i = triton.InferInput("i", [1, 1], "INT64").set_data_from_numpy(np.array([[index]], np.int64))
            return client.infer("table", [i]).get_response()

        remarks = [ask(1).parameters["halfserve.precision"].string_param for _ in range(2)]
        assert remarks == ["fp32", "fp32"]
        for _ in range(2):
            with pytest.raises(triton.InferenceServerException):
                ask(7)
        assert statistics(client, "table")[:2] == (0, 2)
        assert [ask(0).raw_output_contents for _ in range(2)] == [[np.float16(5).tobytes()]] * 2
        assert statistics(client, "table")[:2] == (1, 3)


def test_no_answer_outlives_its_version(mlp: Path) -> None:
    with (
        running_server(list) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        cache = ResponseCache(2**20)

        def set_cache() -> None:
            server.core.response_cache = cache

        server.call(set_cache)
        controlling = server.call(lambda: control(server.core, mlp, ControlMode.EXPLICIT, load_at_start=("mlp",)))
        try:
            server.run(controlling.start())
            for _ in range(2):
                before = client.infer("mlp", x_of(1)).as_numpy("y")
            assert statistics(client)[:2] == (1, 1)
            text = (mlp / "mlp" / "config.pbtxt").read_text()
            (mlp / "mlp" / "config.pbtxt").write_text(f"{text} version_policy {{ all {{}} }}")
            save_mlp(mlp / "mlp" / "2" / "model.onnx")
            client.load_model("mlp")
            for version in ("1", "2", "2"):
                np.testing.assert_array_equal(client.infer("mlp", x_of(1), model_version=version).as_numpy("y"), before)
            (newer,) = client.get_inference_statistics("mlp", "2").model_stats
            assert (newer.inference_stats.cache_hit.count, newer.inference_stats.cache_miss.count) == (1, 1)
            client.unload_model("mlp")
            assert server.call(lambda: cache.size) == 0
        finally:
            server.call(controlling.close)


def test_who_may_not_use_a_model_gets_none_of_its_answers(tmp_path: Path) -> None:
    made = [new_token("ours", [Role.INFER], models=["held"]), new_token("other", [Role.INFER], models=["else"])]
    ours, other = write_tokens(tmp_path / "tokens", *made)
    backend = HeldBackend()

    def models() -> list[Model]:
        model = held_model(backend)
        model.config.response_cache.enable = True
        cache_answers(model, ResponseCache(2**20))
        return [model]

    options = SecurityOptions(token_file=tmp_path / "tokens", watch_s=WATCH_S)
    with guarded_server(options, models=models) as (server, _), grpc.insecure_channel(server.address) as channel:
        request = infer_request()
        assert call(channel, INFER_PATH, request, bearer(ours)) == call(channel, INFER_PATH, request, bearer(ours))
        assert len(backend.batches) == 1
        with pytest.raises(grpc.RpcError) as refused:
            call(channel, INFER_PATH, request, bearer(other))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_the_option_bounds_the_memory_and_the_metrics_say_what_it_holds(mlp: Path) -> None:
    with serving(mlp, "--response-cache-mib", "1", "--cpu") as (_, ready):
        with triton.InferenceServerClient(f"127.0.0.1:{ready['grpc_port']}") as client:
            values = np.random.default_rng(0).standard_normal((1500, 64)).astype(np.float16)
            for value in values:
                client.infer("mlp", x_of(value))
            client.infer("mlp", x_of(values[-1]))  # still there
            client.infer("mlp", x_of(values[0]))  # dropped long ago
            assert statistics(client) == (1, 1501, 1502, 1501)
        text = metrics(ready["metrics_port"])
    model = '{model="mlp",version="1"}'
    assert f"nv_cache_num_hits_per_model{model} 1\n" in text
    assert f"nv_cache_num_misses_per_model{model} 1501\n" in text
    lines = dict(line.split(" ") for line in text.splitlines() if line.startswith("halfserve_response_cache_"))
    assert 0 < int(lines["halfserve_response_cache_bytes"]) <= 2**20
    assert 0 < int(lines["halfserve_response_cache_evictions_total"]) < 1501


@pytest.mark.long
def test_a_cache_smaller_than_a_mib_holds_as_much_as_asked(mlp: Path) -> None:
    with serving(mlp, "--response-cache-mib", str(2048 / 2**20), "--cpu") as (_, ready):
        with triton.InferenceServerClient(f"127.0.0.1:{ready['grpc_port']}") as client:
            for value in (1, 1, 2, 1):  # one answer takes some 1,400 bytes
                client.infer("mlp", x_of(value))
            assert statistics(client) == (1, 3, 4, 3)
        text = metrics(ready["metrics_port"])
    lines = dict(line.split(" ") for line in text.splitlines() if line.startswith("halfserve_response_cache_"))
    assert 1024 < int(lines["halfserve_response_cache_bytes"]) <= 2048


def test_summaries_take_the_place_of_counters_where_asked_for(mlp: Path) -> None:
    settings = ("counter_latencies=false", "summary_latencies=true", "summary_quantiles=0.5:0.05,0.75:0.01")
    options = [word for setting in settings for word in ("--metrics-config", setting)]
    with serving(mlp, *options, "--cpu") as (_, ready):
        with triton.InferenceServerClient(f"127.0.0.1:{ready['grpc_port']}") as client:
            for value in (1, 1, 2):
                client.infer("mlp", x_of(value))
            told = client.get_inference_statistics("mlp", "1", as_json=True)["model_stats"][0]["inference_stats"]
        text = metrics(ready["metrics_port"])
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines())
    model = 'model="mlp",version="1"'
    for name, count in (("inference_queue", 3), ("inference_compute_infer", 2), ("cache_hit", 1), ("cache_miss", 2)):
        field = name.removeprefix("inference_") if name != "cache_hit" else name
        assert int(samples[f"nv_{name}_summary_us_count{{{model}}}"]) == count
        assert int(samples[f"nv_{name}_summary_us_sum{{{model}}}"]) == int(told[field]["ns"]) // 1000
    for quantile in ("0.5", "0.75"):
        assert float(samples[f'nv_inference_compute_infer_summary_us{{model="mlp",quantile="{quantile}",version="1"}}']) > 0
    assert f"nv_inference_request_success{{{model}}}" in samples
    assert not any(f"nv_{name}" in text for name in ("inference_request_summary", "inference_queue_duration", "cache_num_hits"))


@pytest.mark.parametrize(
    "setting",
    ["model_transaction_policy { decoupled: true }", "sequence_batching { direct {} }"],
    ids=["decoupled", "sequence"],
)
def test_answers_that_inputs_alone_do_not_decide_are_not_cached(mlp: Path, setting: str) -> None:
    (mlp / "mlp" / "config.pbtxt").write_text(f"{ENABLED} {setting}")
    with pytest.raises(ModelLoadError, match=r"response_cache is for models with one answer that the inputs alone decide"):
        load_repository(mlp)


def test_a_server_without_a_cache_says_that_the_setting_has_no_effect(mlp: Path) -> None:
    with serving(mlp, "--response-cache-mib", "0", "--cpu") as (process, ready):
        with triton.InferenceServerClient(f"127.0.0.1:{ready['grpc_port']}") as client:
            for _ in range(2):
                client.infer("mlp", x_of(1))
            assert statistics(client) == (0, 0, 2, 2)
        process.terminate()
        _, errors = process.communicate(timeout=500)
    assert errors.strip().endswith("mlp/1: response_cache has no effect, as the server has --response-cache-mib 0")


def metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())
