"""What the page shows, of many models: others get the event loop while it is put together."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from halfserve.protos.certificates import MAX_CERTIFICATE_BYTES, RECORDED_INPUT, RECORDED_OUTPUT, SAMPLES
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import VersionState
from halfserve.serve.http.page.certificates import MAX_BYTES, Certificates, certificate_of, summary
from halfserve.serve.http.page.model_history import ModelHistory
from halfserve.serve.http.page.page_files import POLICY, STATIC_FILES
from halfserve.serve.http.page.page_state import PageState
from tests.models import save_mlp, save_thousandfold
from tests.serve.conftest import load_repository, vouched
from tests.serve.engine.fakes import MEASURED, HeldBackend, held_model, measured_model
from tests.serve.http.running_http import running_http
from tests.serve.running_server import running_server

STATIC = resources.files("halfserve.serve.http.page").joinpath("static")
MODELS = 20
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SETTINGS = {"precision_guard": "fallback", "shadow_rate": "1", "fp32_twin": "fp32/model.onnx"}
CERTIFICATE = {
    "schema": "halfserve.certificate",
    "passed": True,
    "samples": 7,
    "created_utc": "2026-01-02T03:04:05+00:00",
    "conversion": {"fp16_nodes": 3, "float_nodes": 4},
}


@pytest.mark.parametrize("name", sorted(STATIC_FILES))
def test_every_file_is_served_as_what_it_is(http: httpx.Client, name: str) -> None:
    answer = http.get({"index.html": "/", "docs.html": "/docs"}.get(name, f"/ui/files/{name}"))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == STATIC_FILES[name]
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.content == STATIC.joinpath(name).read_bytes()
    known = http.get(answer.url.path, headers={"if-none-match": answer.headers["etag"]})
    assert (known.status_code, known.content) == (304, b"")
    assert known.headers["content-security-policy"] == POLICY


def test_no_other_file_is_served(http: httpx.Client) -> None:
    assert {entry.name for entry in STATIC.iterdir()} == set(STATIC_FILES)
    answer = http.get("/ui/files/page.py")
    assert (answer.status_code, answer.json()["error"]) == (404, "the page has no file 'page.py'")
    assert http.get("/ui/files/..%2fpage.py").status_code == 404


def test_nothing_comes_from_elsewhere_and_nothing_is_inline() -> None:
    for name in STATIC_FILES:
        text = STATIC.joinpath(name).read_text(encoding="utf-8")
        assert not re.search(r"""(src|href|url\(|from|fetch\()\s*=?\s*["'`(]*(https?:)?//""", text), name
        assert "innerHTML" not in text
        assert "eval(" not in text
        if name.endswith(".html"):
            assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*src)", text)


def test_the_state_names_models_and_what_they_take(http: httpx.Client) -> None:
    state = http.get("/ui/state").json()
    assert state["ready"] is True
    (mlp,) = (m for m in state["models"] if (m["name"], m["version"]) == ("mlp", "3"))
    assert (mlp["state"], mlp["provider"], mlp["max_batch_size"]) == ("READY", "CPUExecutionProvider", 16)
    assert mlp["inputs"] == [{"name": "x", "datatype": "FP16", "shape": [-1, 64]}]
    assert mlp["outputs"] == [{"name": "y", "datatype": "FP16", "shape": [-1, 10], "labelled": True}]
    assert mlp["task"] == ""
    assert mlp["certificate"] is None
    assert mlp["copies"] == [{"up": True, "restarts": 0, "fault": None, "most_rows": None}]
    assert state["series"][:2] == ["time_s", "requests"]


def test_the_state_says_what_was_measured_when_a_model_was_loaded() -> None:
    with running_server(lambda: [measured_model()]) as server, running_http(server) as rest:
        (model,) = httpx.get(f"http://127.0.0.1:{rest.port}/ui/state", timeout=60).json()["models"]
    assert (model["provider"], model["precision"], model["measured"]) == ("test", "fp32", MEASURED)


def test_samples_may_be_asked_for_from_a_time_on(http: httpx.Client) -> None:
    state = http.get("/ui/state?since=9e12").json()
    assert all(model["samples"] == [] for model in state["models"])
    answer = http.get("/ui/state?since=now")
    assert (answer.status_code, answer.json()) == (400, {"error": "since is 'now', expected seconds since the epoch"})


def test_a_model_without_a_certificate_says_so(http: httpx.Client) -> None:
    answer = http.get("/ui/certificates/mlp/1")
    assert answer.status_code == 404
    assert answer.json()["error"] == ("version 1 of 'mlp' has no certificate; `halfserve export` writes one beside the model")
    assert http.get("/ui/certificates/nobody/1").status_code == 404


def test_the_recorded_sample_and_labels_are_examples(http: httpx.Client, tmp_path: Path) -> None:
    assert http.get("/ui/examples/mlp/3").json() == {"sample": None, "labels": {"y": DIGITS}, "scores": "softmax"}
    path = save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    x, y = np.ones((3, 64), np.float32), np.array([[0.1] * 9 + [np.nan]] * 3, np.float32)
    np.savez(path.with_name(SAMPLES), allow_pickle=False, **{f"{RECORDED_INPUT}x": x, f"{RECORDED_OUTPUT}y": y})
    files = {SAMPLES: hashlib.sha256(path.with_name(SAMPLES).read_bytes()).hexdigest()}
    path.with_name("certificate.json").write_text(json.dumps(CERTIFICATE | {"files": files}))
    for load, is_shown in ((lambda: vouched(load_repository(tmp_path)), True), (lambda: load_repository(tmp_path), False)):
        with running_server(load) as server, running_http(server) as rest:
            sample = httpx.get(f"http://127.0.0.1:{rest.port}/ui/examples/mlp/1", timeout=60).json()["sample"]
        if is_shown:
            assert sample["inputs"] == [{"name": "x", "datatype": "FP16", "shape": [1, 64], "data": [1.0] * 64}]
            assert sample["outputs"][0]["data"][8:] == [pytest.approx(0.1), "NaN"]
        else:
            assert sample is None


def test_a_certificate_that_the_load_did_not_accept_is_not_shown(tmp_path: Path) -> None:
    path = save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    path.with_name("certificate.json").write_text(json.dumps(CERTIFICATE))
    with running_server(lambda: load_repository(tmp_path)) as server, running_http(server) as rest:
        assert httpx.get(f"http://127.0.0.1:{rest.port}/ui/certificates/mlp/1", timeout=60).status_code == 404


def test_the_state_shows_certificates_and_refused_versions(tmp_path: Path) -> None:
    path = save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    certificate = {"schema": "halfserve.certificate", "passed": True, "samples": 12}
    path.with_name("certificate.json").write_text(json.dumps(certificate))
    with running_server(lambda: vouched(load_repository(tmp_path))) as server, running_http(server) as rest:
        server.call(lambda: server.core.states.set("mlp", 2, VersionState.UNAVAILABLE, "it is cut off"))
        url = f"http://127.0.0.1:{rest.port}/ui"
        assert httpx.get(f"{url}/certificates/mlp/1", timeout=60).json() == certificate
        served, refused = httpx.get(f"{url}/state", timeout=60).json()["models"]
    assert (served["state"], served["certificate"]["passed"]) == ("READY", True)
    assert refused == {"name": "mlp", "version": "2", "state": "UNAVAILABLE", "reason": "it is cut off"}


async def read_amid_looks() -> tuple[list[dict[str, Any]], int, list[dict[str, Any]]]:
    """The models of a state during which samples came, how often these did, and the models of the state after it."""
    core = InferenceCore([held_model(HeldBackend(), name=f"m{number:02}") for number in range(MODELS)])
    history = ModelHistory(core)
    state = PageState(core, history, Certificates())
    history.look()
    reading = asyncio.create_task(state.read(0))
    looks = 0
    while not reading.done():
        await asyncio.sleep(0)
        history.look()
        looks += 1
    before = json.loads(await reading)
    latest = max(model["samples"][-1][0] for model in before["models"])
    after = json.loads(await state.read(latest))
    await core.drain()
    return before["models"], looks, after["models"]


def test_others_get_the_loop_and_all_models_end_at_the_same_sample() -> None:
    before, looks, after = asyncio.run(read_amid_looks())
    assert looks >= MODELS
    counts = {len(first["samples"]) + len(second["samples"]) for first, second in zip(before, after, strict=True)}
    assert counts == {1 + looks}
    assert [model["name"] for model in before] == [f"m{number:02}" for number in range(MODELS)]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A model that fp16 is too small for, with its fp32 twin, and one without a guard."""
    root = tmp_path_factory.mktemp("guarded")
    save_thousandfold(root / "guarded" / "1" / "model.onnx", np.float16)
    save_thousandfold(root / "guarded" / "1" / "fp32" / "model.onnx", np.float32)
    lines = [f'parameters {{ key: "halfserve.{key}" value {{ string_value: "{value}" }} }}' for key, value in SETTINGS.items()]
    (root / "guarded" / "config.pbtxt").write_text("\n".join(["max_batch_size: 4", *lines]))
    save_thousandfold(root / "plain" / "1" / "model.onnx", np.float16)
    off = 'parameters { key: "halfserve.precision_guard" value { string_value: "off" } }'
    (root / "plain" / "config.pbtxt").write_text(f"max_batch_size: 4 {off}")
    with running_server(lambda: load_repository(root)) as server, running_http(server) as rest:
        yield f"http://127.0.0.1:{rest.port}"


def infer(url: str, value: float) -> httpx.Response:
    x = {"name": "x", "datatype": "FP16", "shape": [1, 4], "data": [value, 0, 0, 0]}
    return httpx.post(f"{url}/v2/models/guarded/infer", json={"inputs": [x]}, timeout=60)


def test_what_the_guard_sees_is_shown(url: str) -> None:
    assert infer(url, 1).json()["outputs"][0]["data"] == [1000, 0, 0, 0]
    answer = infer(url, 100)
    assert answer.status_code == 500
    assert "output 'y' holds 1 of 4 values that are NaN or infinite" in answer.json()["error"]
    state = httpx.get(f"{url}/ui/state", timeout=60).json()
    guarded, plain = state["models"]
    assert plain["guard"] is None
    assert guarded["guard"]["policy"] == "fallback"
    assert guarded["guard"]["non_finite_requests"] == 1
    assert guarded["guard"]["rejected"] == 1
    assert guarded["guard"]["degraded"] is False
    (event,) = (event for event in state["events"] if event["kind"] == "rejected")
    assert event["model"] == "guarded/1"
    assert "beyond float16's range" in event["text"]
    assert event["time_s"] == pytest.approx(state["time_s"], abs=60)


def test_a_certificate_is_read_and_summed_up(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(CERTIFICATE))
    content = certificate_of(tmp_path / "model.xml")
    assert content == CERTIFICATE
    assert summary(content) == {
        "passed": True,
        "created": "2026-01-02T03:04:05+00:00",
        "samples": 7,
        "fp16_nodes": 3,
        "float_nodes": 4,
    }


def test_what_it_does_not_say_is_left_open() -> None:
    assert summary({"passed": "yes", "conversion": []}) == {
        "passed": False,
        "created": None,
        "samples": None,
        "fp16_nodes": None,
        "float_nodes": None,
    }


NO_NUMBER = b'{"schema": "halfserve.certificate", "samples": %s}'


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b'{"schema": "other"}', b"\xff", b"[" * 100_000, NO_NUMBER % b"NaN", NO_NUMBER % b"1e999"],
    ids=range(7),
)
def test_an_invalid_certificate_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "certificate.json"
    path.write_bytes(content)
    assert certificate_of(tmp_path / "model.xml") is None


def test_an_absent_or_huge_certificate_is_none(tmp_path: Path) -> None:
    model = tmp_path / "model.xml"
    assert certificate_of(model) is None
    for size in (MAX_BYTES + 1, MAX_CERTIFICATE_BYTES + 1):
        with (tmp_path / "certificate.json").open("wb") as file:
            file.truncate(size)
        assert certificate_of(model) is None
