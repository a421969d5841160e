from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from serve.http.options import HttpOptions
from tests.models import save_thousandfold
from tests.serve.conftest import load_repository
from tests.serve.http.running_http import running_http
from tests.serve.running_server import running_server

SETTINGS = {"precision_guard": "fallback", "shadow_rate": "1", "fp32_twin": "fp32/model.onnx"}


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
    with (
        running_server(lambda: load_repository(root)) as server,
        running_http(server, HttpOptions(port=0, metrics_port=None)) as rest,
    ):
        yield f"http://127.0.0.1:{rest.port}"


def infer(url: str, value: float) -> httpx.Response:
    x = {"name": "x", "datatype": "FP16", "shape": [1, 4], "data": [value, 0, 0, 0]}
    return httpx.post(f"{url}/v2/models/guarded/infer", json={"inputs": [x]})


def test_what_the_guard_sees_is_shown(url: str) -> None:
    assert infer(url, 1).json()["outputs"][0]["data"] == [1000, 0, 0, 0]
    answer = infer(url, 100)
    assert answer.status_code == 500
    assert "output 'y' holds 1 of 4 values that are NaN or infinite" in answer.json()["error"]
    state = httpx.get(f"{url}/ui/state").json()
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
