from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import httpx
import pytest

from serve.engine.model import VersionState
from serve.http.options import HttpOptions
from serve.http.page.page import FILES, POLICY
from tests.models import save_mlp
from tests.serve.conftest import load_repository
from tests.serve.http.running_http import running_http
from tests.serve.running_server import running_server

STATIC = resources.files("serve.http.page").joinpath("static")


@pytest.mark.parametrize("name", sorted(FILES))
def test_every_file_is_served_as_what_it_is(http: httpx.Client, name: str) -> None:
    answer = http.get("/" if name == "index.html" else f"/ui/{name}")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == FILES[name]
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.content == STATIC.joinpath(name).read_bytes()


def test_no_other_file_is_served(http: httpx.Client) -> None:
    assert {entry.name for entry in STATIC.iterdir()} == set(FILES)
    answer = http.get("/ui/page.py")
    assert (answer.status_code, answer.json()["error"]) == (404, "the page has no file 'page.py'")
    assert http.get("/ui/..%2fpage.py").status_code == 404


def test_nothing_comes_from_elsewhere_and_nothing_is_inline() -> None:
    for name in FILES:
        text = STATIC.joinpath(name).read_text(encoding="utf-8")
        assert not re.search(r"""(src|href|url\(|from|fetch\()\s*=?\s*["'`(]*(https?:)?//""", text), name
        assert "innerHTML" not in text
        assert "eval(" not in text
    page = STATIC.joinpath("index.html").read_text(encoding="utf-8")
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]*src)", page)


def test_the_state_names_models_and_what_they_take(http: httpx.Client) -> None:
    state = http.get("/ui/state").json()
    assert state["ready"] is True
    (mlp,) = (m for m in state["models"] if (m["name"], m["version"]) == ("mlp", "3"))
    assert (mlp["state"], mlp["provider"], mlp["max_batch_size"]) == ("READY", "CPUExecutionProvider", 16)
    assert mlp["inputs"] == [{"name": "x", "datatype": "FP16", "shape": [-1, 64]}]
    assert mlp["certificate"] is None
    assert mlp["copies"] == [{"up": True, "restarts": 0, "fault": None, "most_rows": None}]
    assert state["series"][:2] == ["time_s", "requests"]


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


def test_a_certificate_is_shown_and_so_is_what_was_refused(tmp_path: Path) -> None:
    path = save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    certificate = {"schema": "halfserve.certificate", "passed": True, "samples": 12}
    path.with_name("certificate.json").write_text(json.dumps(certificate))
    with (
        running_server(lambda: load_repository(tmp_path)) as server,
        running_http(server, HttpOptions(port=0, metrics_port=None)) as rest,
    ):
        server.call(lambda: server.core.states.set("mlp", 2, VersionState.UNAVAILABLE, "it is cut off"))
        url = f"http://127.0.0.1:{rest.port}/ui"
        assert httpx.get(f"{url}/certificates/mlp/1", timeout=20).json() == certificate
        served, refused = httpx.get(f"{url}/state", timeout=20).json()["models"]
    assert (served["state"], served["certificate"]["passed"]) == ("READY", True)
    assert refused == {"name": "mlp", "version": "2", "state": "UNAVAILABLE", "reason": "it is cut off"}
