"""Models are loaded and unloaded by request."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.config.model_config import config_from_json
from halfserve.serve.engine.errors import LISTING, ModelLoadError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.model_control.control_options import ALL, ControlMode
from tests.models import save_mlp
from tests.serve.engine.ensembles.configurations import ensemble, step
from tests.serve.ensemble_folders import save_ensemble
from tests.serve.model_control.controlled import ask, control, controlled_server, lines
from tests.serve.running_server import TRANSPORTS, RunningServer

NOT_LOADED = "not loaded; RepositoryModelLoad loads it"
KEPT = "serves as it was loaded before; what is there now was refused: "


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    save_mlp(tmp_path / "repository" / "mlp" / "1" / "model.onnx")
    save_mlp(tmp_path / "repository" / "other" / "1" / "model.onnx")
    return tmp_path / "repository"


@pytest.fixture(params=TRANSPORTS)
def server(repository: Path, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """Over each transport: what takes its time is a call of its own kind there."""
    with controlled_server(repository, ControlMode.EXPLICIT, TRANSPORTS[request.param]) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as opened:
        yield opened


def index(client: triton.InferenceServerClient) -> list[tuple[str, str, str, str]]:
    return [(m.name, m.version, m.state, m.reason) for m in client.get_model_repository_index().models]


def refusal(client: triton.InferenceServerClient, name: str, **arguments: object) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as refused:
        client.load_model(name, **arguments)
    return refused.value.status().removeprefix("StatusCode."), refused.value.message()


def break_model(repository: Path, name: str = "mlp", version: str = "1") -> Path:
    path = repository / name / version / "model.onnx"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"this is no model")
    return path


def assert_start_fails(repository: Path, match: str, mode: ControlMode = ControlMode.NONE, **options: Any) -> None:
    with pytest.raises(ModelLoadError, match=match), controlled_server(repository, mode, **options):
        raise AssertionError


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_a_model_is_loaded_served_unloaded_and_loaded_again(client: triton.InferenceServerClient) -> None:
    assert index(client) == [("mlp", "", "UNAVAILABLE", NOT_LOADED), ("other", "", "UNAVAILABLE", NOT_LOADED)]
    assert client.is_server_ready()
    assert not client.is_model_ready("mlp")
    client.load_model("mlp")
    assert client.is_model_ready("mlp")
    assert client.is_model_ready("mlp", "1")
    answer = ask(client)
    client.unload_model("mlp", unload_dependents=True)
    assert not client.is_model_ready("mlp")
    assert not client.is_model_ready("mlp", "1")
    with pytest.raises(InferenceServerException, match="model 'mlp' is not served now; `halfserve models`"):
        ask(client)
    assert index(client)[0] == ("mlp", "1", "UNAVAILABLE", "unloaded")
    client.load_model("mlp")
    assert index(client) == [("mlp", "1", "READY", ""), ("other", "", "UNAVAILABLE", NOT_LOADED)]
    assert ask(client) == answer


def test_a_model_that_is_added_later_is_listed_and_loaded(client: triton.InferenceServerClient, repository: Path) -> None:
    save_mlp(repository / "late" / "4" / "model.onnx")
    assert ("late", "", "UNAVAILABLE", NOT_LOADED) in index(client)
    client.load_model("late")
    assert ask(client, "late", "4") == ask(client, "late")


def test_the_index_can_list_ready_models_only(server: RunningServer, client: triton.InferenceServerClient) -> None:
    client.load_model("mlp")
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/RepositoryIndex")
        answer = call(pb.RepositoryIndexRequest(ready=True).SerializeToString(), timeout=60)
        with pytest.raises(grpc.RpcError, match="repository_name is 'x', expected ''"):
            call(pb.RepositoryIndexRequest(repository_name="x").SerializeToString(), timeout=60)
    assert [(m.name, m.state) for m in pb.RepositoryIndexResponse.FromString(answer).models] == [("mlp", "READY")]


def config_of(client: triton.InferenceServerClient) -> tuple[int, str]:
    """Return the batch size of the model's configuration, and its parameter "who"."""
    config = client.get_model_config("mlp", as_json=True)["config"]
    return config["max_batch_size"], config["parameters"].get("who", {}).get("string_value", "")


def test_a_config_that_comes_along_is_kept_by_later_loads(client: triton.InferenceServerClient) -> None:
    client.load_model("mlp", config=json.dumps({"max_batch_size": 3, "parameters": {"who": {"string_value": "me"}}}))
    client.load_model("mlp")
    assert config_of(client) == (3, "me")
    assert refusal(client, "mlp", config="no JSON")[0] == "INVALID_ARGUMENT"
    client.load_model("mlp")
    assert config_of(client) == (3, "me")
    client.load_model("mlp", config='{"max_batch_size": 4}')
    client.load_model("mlp")
    assert config_of(client) == (4, "")
    client.unload_model("mlp")
    client.load_model("mlp")
    assert config_of(client) == (32, "")


def test_changed_files_end_a_config_that_came_along(client: triton.InferenceServerClient, repository: Path) -> None:
    client.load_model("mlp", config='{"max_batch_size": 3}')
    (repository / "mlp" / "config.pbtxt").write_text("max_batch_size: 5")
    client.load_model("mlp")
    assert config_of(client) == (5, "")
    client.load_model("mlp", config='{"max_batch_size": 3}')
    save_mlp(repository / "mlp" / "2" / "model.onnx")
    client.load_model("mlp")
    assert config_of(client) == (5, "")


def test_the_config_that_the_server_tells_can_be_sent_back(client: triton.InferenceServerClient) -> None:
    client.load_model("mlp")
    told = client.get_model_config("mlp", as_json=True)["config"]
    client.load_model("mlp", config=json.dumps(told))
    assert client.get_model_config("mlp", as_json=True)["config"] == told


def test_a_new_version_takes_over_and_the_old_one_leaves(client: triton.InferenceServerClient, repository: Path) -> None:
    client.load_model("mlp")
    save_mlp(repository / "mlp" / "2" / "model.onnx")
    client.load_model("mlp")
    assert ask(client, version="2") == ask(client)
    assert client.get_model_metadata("mlp").versions == ["2"]
    assert not client.is_model_ready("mlp", "1")
    client.load_model("mlp", config='{"version_policy": {"all": {}}}')
    assert client.get_model_metadata("mlp").versions == ["1", "2"]
    client.load_model("mlp", config='{"version_policy": {"specific": {"versions": [1]}}}')
    assert client.get_model_metadata("mlp").versions == ["1"]


def test_unchanged_versions_stay_loaded(server: RunningServer, client: triton.InferenceServerClient, repository: Path) -> None:
    (repository / "mlp" / "config.pbtxt").write_text("version_policy { all {} }")
    client.load_model("mlp")
    (first,) = server.call(lambda: server.core.versions("mlp"))
    save_mlp(repository / "mlp" / "2" / "model.onnx")
    client.load_model("mlp")
    kept, _ = server.call(lambda: server.core.versions("mlp"))
    assert kept is first
    save_mlp(repository / "mlp" / "1" / "model.onnx")
    client.load_model("mlp")
    reloaded, _ = server.call(lambda: server.core.versions("mlp"))
    assert reloaded is not first


def test_a_broken_version_is_refused_while_the_old_one_serves(client: triton.InferenceServerClient, repository: Path) -> None:
    client.load_model("mlp")
    answer = ask(client)
    broken = break_model(repository, version="2")
    code, text = refusal(client, "mlp")
    assert code == "FAILED_PRECONDITION"
    assert text.startswith("model 'mlp' was refused: mlp/2/model.onnx: is not")
    assert str(repository) not in text
    assert ask(client) == answer
    assert client.is_model_ready("mlp")
    assert not client.is_model_ready("mlp", "2")
    one, two, _ = index(client)
    assert one == ("mlp", "1", "READY", "")
    assert two[:3] == ("mlp", "2", "UNAVAILABLE")
    assert two[3].startswith("mlp/2/model.onnx: is not")
    save_mlp(broken)
    client.load_model("mlp")
    assert client.get_model_metadata("mlp").versions == ["2"]


def test_a_version_with_broken_new_files_serves_from_the_old_ones(
    client: triton.InferenceServerClient, repository: Path
) -> None:
    client.load_model("mlp")
    answer = ask(client)
    break_model(repository)
    refusal(client, "mlp")
    assert ask(client) == answer
    assert client.is_model_ready("mlp", "1")
    (one, _) = index(client)
    assert one[:3] == ("mlp", "1", "READY")
    assert one[3].startswith(f"{KEPT}mlp/1/model.onnx: is not")
    (repository / "mlp" / "config.pbtxt").write_text("max_batch_size: what")
    assert "mlp/config.pbtxt: 1:17" in refusal(client, "mlp")[1]
    assert ask(client) == answer


def test_a_refusal_names_only_the_refused_versions(client: triton.InferenceServerClient, repository: Path) -> None:
    for version in "23":
        save_mlp(repository / "mlp" / version / "model.onnx")
    client.load_model("mlp", config='{"version_policy": {"all": {}}}')
    client.load_model("mlp", config='{"version_policy": {"latest": {"num_versions": 2}}}')
    (repository / "mlp" / "config.pbtxt").write_text("max_batch_size: what")
    text = refusal(client, "mlp")[1]
    assert text.startswith(f"model 'mlp' was refused: {KEPT}mlp/config.pbtxt: 1:17"), "of version 1 nothing is asked any more"
    assert text.count("1:17") == 1, "the versions 2 and 3 share the reason"


def test_a_refusal_is_reported_although_another_version_is_good(client: triton.InferenceServerClient, repository: Path) -> None:
    every = '{"version_policy": {"all": {}}}'
    client.load_model("mlp", config=every)
    break_model(repository)
    save_mlp(repository / "mlp" / "2" / "model.onnx")
    assert refusal(client, "mlp", config=every)[1].startswith(f"model 'mlp' was refused: {KEPT}mlp/1/model.onnx: is not")
    one, two, _ = index(client)
    assert (one[2], two[2]) == ("READY", "READY")
    assert one[3].startswith(KEPT)
    assert ask(client, version="2") == ask(client, version="1")
    save_mlp(repository / "mlp" / "1" / "model.onnx")
    client.load_model("mlp", config=every)
    assert [line[2:] for line in index(client)[:2]] == [("READY", ""), ("READY", "")]


def test_a_model_that_was_never_good_is_not_ready(client: triton.InferenceServerClient, repository: Path) -> None:
    break_model(repository)
    refusal(client, "mlp")
    assert not client.is_model_ready("mlp")
    assert index(client)[0][:3] == ("mlp", "1", "UNAVAILABLE")
    (repository / "mlp" / "1" / "model.onnx").unlink()
    assert "mlp: none of its version folders" in refusal(client, "mlp")[1]
    assert index(client)[0][:3] == ("mlp", "", "UNAVAILABLE")


def test_a_model_folder_that_is_deleted_goes_on_serving(client: triton.InferenceServerClient, repository: Path) -> None:
    client.load_model("mlp")
    answer = ask(client)
    shutil.rmtree(repository / "mlp")
    assert ask(client) == answer
    assert index(client)[0] == ("mlp", "1", "READY", "")
    assert refusal(client, "mlp") == ("NOT_FOUND", f"the repository has no model 'mlp'; {LISTING} lists what it has")
    assert ask(client) == answer


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../other", "mlp/../other", "/etc", ".hidden", "a\\b", "a\0b", pytest.param("x" * 300, id="long")]
)
def test_names_that_leave_the_repository_are_refused(client: triton.InferenceServerClient, name: str) -> None:
    code, text = refusal(client, name)
    assert (code, "is not valid, expected the name of a folder in the repository" in text) == ("INVALID_ARGUMENT", True)
    with pytest.raises(InferenceServerException, match="is not valid, expected the name of a folder"):
        client.unload_model(name)


@pytest.mark.long
def test_names_of_no_model_leave_nothing_behind(client: triton.InferenceServerClient) -> None:
    before = locks()
    for number in range(20):
        assert refusal(client, f"nope{number}")[0] == "NOT_FOUND"
    assert locks() <= before + 1


def locks() -> int:
    """How many locks this process holds."""
    gc.collect()
    return sum(type(found) is asyncio.Lock for found in gc.get_objects())  # `isinstance` asks objects of torch that warn then


def test_a_link_out_of_the_repository_is_refused(client: triton.InferenceServerClient, repository: Path) -> None:
    save_mlp(repository.parent / "outside" / "1" / "model.onnx")
    (repository / "linked").symlink_to(repository.parent / "outside")
    assert "linked: is a link out of the repository" in refusal(client, "linked")[1]
    (repository / "mlp" / "2").mkdir()
    (repository / "mlp" / "2" / "model.onnx").symlink_to(repository.parent / "outside" / "1" / "model.onnx")
    assert "mlp/2/model.onnx: is a link out of the repository" in refusal(client, "mlp")[1]
    (repository / "mlp" / "2" / "model.onnx").unlink()
    (repository / "mlp" / "2" / "model.onnx").symlink_to(repository / "other" / "1" / "model.onnx")
    client.load_model("mlp")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ({"config": "{"}, "INVALID_ARGUMENT", "the config of the load request is no JSON: "),
        ({"config": "[]"}, "INVALID_ARGUMENT", "is no JSON object; expected a ModelConfig's fields"),
        ({"config": '{"max_batch": 3}'}, "INVALID_ARGUMENT", "is no ModelConfig: unknown field 'max_batch'; did you mean"),
        ({"config": '{"name": "x"}'}, "FAILED_PRECONDITION", "mlp/config of the load request: name is 'x', expected"),
        (
            {"config": '{"parameters": {"halfserve.warmup": {"string_value": "off"}}}'},
            "FAILED_PRECONDITION",
            "parameter 'halfserve.warmup' is not known; did you mean 'halfserve.warm_up'?",
        ),
        (
            {"config": "{}", "files": {"file:m": b""}},
            "FAILED_PRECONDITION",
            "model files in a load request are refused",
        ),
        (
            {"config": "{}", "files": {"m": b""}},
            "INVALID_ARGUMENT",
            "parameter 'm' is not known; expected",
        ),
    ],
)
def test_a_refused_load_says_why(
    client: triton.InferenceServerClient, arguments: dict[str, object], code: str, text: str
) -> None:
    client.load_model("mlp")
    given, message = refusal(client, "mlp", **arguments)
    assert (given, text in message) == (code, True), message
    assert client.is_model_ready("mlp")


def test_models_are_loaded_at_the_start_where_that_is_asked_for(repository: Path) -> None:
    with controlled_server(repository, ControlMode.EXPLICIT, load_at_start=("other",)) as server:
        assert lines(server) == [("mlp", "", "UNAVAILABLE", NOT_LOADED), ("other", "1", "READY", "")]
    with controlled_server(repository, ControlMode.EXPLICIT, load_at_start=(ALL,)) as server:
        assert [line[:3] for line in lines(server)] == [("mlp", "1", "READY"), ("other", "1", "READY")]
    reason = "has no model 'nope' to load at the start; it has mlp, other"
    assert_start_fails(repository, reason, ControlMode.EXPLICIT, load_at_start=("nope",))


def test_a_broken_model_stops_the_start_unless_keep_going(repository: Path) -> None:
    break_model(repository)
    end = r"export it again\. The server starts with all its models or not at all; --keep-going starts it with the others$"
    assert_start_fails(repository, f"mlp/1/model.onnx: is not .*{end}")
    with controlled_server(repository, ControlMode.NONE, keep_going=True) as server:
        assert [line[:3] for line in lines(server)] == [("mlp", "1", "UNAVAILABLE"), ("other", "1", "READY")]


def test_each_broken_model_has_its_line_before_the_start_ends(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_mlp(repository / "third" / "1" / "model.onnx")
    for name in ("mlp", "third"):
        break_model(repository, name)
    summary = "^2 models cannot be served, for the reasons above. The server starts .*; --keep-going starts it with the others$"
    assert_start_fails(repository, summary)
    first, second = errors(caplog)
    assert "mlp/1/model.onnx: is not" in first
    assert "third/1/model.onnx: is not" in second


def test_a_single_broken_model_is_the_whole_error(repository: Path) -> None:
    shutil.rmtree(repository / "other")
    break_model(repository)
    assert_start_fails(repository, "; export it again$")


def test_the_cause_comes_before_its_consequence(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_ensemble(repository / "an", ensemble(step("mlp", "x=x", "y=out")))
    break_model(repository)
    assert_start_fails(repository, "^2 models cannot be served, for the reasons above. ")
    cause, consequence = errors(caplog)
    assert "mlp/1/model.onnx: is not a readable ONNX file" in cause
    assert consequence.endswith("step 1 (model 'mlp'): the model is not served; load or repair it, or correct model_name")


def test_a_reason_of_a_step_and_its_ensemble_is_said_once(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_ensemble(repository / "an", ensemble(step("mlp", "x=x", "y=out")))
    (repository / "mlp" / "config.pbtxt").write_text("max_batchsize: 4")
    end = r"; did you mean 'max_batch_size'\? The server starts with all its models or not at all; --keep-going starts it"
    assert_start_fails(repository, end)
    assert not errors(caplog)


def test_other_modes_refuse_requests_to_load(repository: Path) -> None:
    with (
        controlled_server(repository, ControlMode.NONE) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        expected = "models are not loaded by request here; start the server with --model-control explicit"
        assert refusal(client, "mlp") == ("UNAVAILABLE", expected)
        with pytest.raises(InferenceServerException, match="UNAVAILABLE.*models are not unloaded by request here"):
            client.unload_model("mlp")
        assert client.is_model_ready("mlp")


def test_concurrent_loads_and_unloads_take_turns(server: RunningServer, repository: Path) -> None:
    def work(number: int) -> None:
        with triton.InferenceServerClient(server.address) as client:
            for turn in range(4):
                client.load_model("mlp", config=f'{{"max_batch_size": {10 * number + turn + 1}}}')
                client.unload_model("mlp")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    with triton.InferenceServerClient(server.address) as client:
        assert index(client)[0] == ("mlp", "1", "UNAVAILABLE", "unloaded")
        client.load_model("mlp")
        assert len(ask(client)) == 10


def test_an_unknown_model_cannot_be_unloaded(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="model 'nope' is not loaded; `halfserve models`"):
        client.unload_model("nope")
    client.unload_model("mlp")  # in the repository, and not loaded: nothing to do


async def longest_turn_s(folder: Path, config: str) -> float:
    """How much of the processor a turn of the loop takes at most while a model is loaded with a configuration."""
    core = InferenceCore([])
    controlling = control(core, folder, ControlMode.EXPLICIT)
    await controlling.start()
    loading = asyncio.create_task(core.load("mlp", config))
    longest_s, last_s = 0.0, time.thread_time()
    while not loading.done():
        await asyncio.sleep(0)
        longest_s, last_s = max(longest_s, time.thread_time() - last_s), time.thread_time()
    await loading
    await core.drain()
    controlling.close()
    return longest_s


@pytest.mark.long
def test_a_large_configuration_does_not_keep_the_loop(tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    config = json.dumps({"parameters": {f"key{number}": {"string_value": "value"} for number in range(20_000)}})
    started_s = time.thread_time()
    config_from_json(config, tmp_path)
    taken_s = time.thread_time() - started_s
    assert asyncio.run(longest_turn_s(tmp_path, config)) < taken_s / 2
