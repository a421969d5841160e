"""Models whose rows depend on each other: requests do not change each other's answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from halfserve.serve.engine.backend import Backend
from halfserve.serve.engine.execution.batch_invariance import ALIKE, differ
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.model_loading import started
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.engine.results import Answered, Failed
from halfserve.serve.engine.tensors import Array
from halfserve.serve.trials import tried_version
from halfserve.serve.trials.batch_invariance_check import check_batch_invariance
from halfserve.serve.trials.tried_version import TrialBatch, TriedVersion
from tests.models import save_mlp, save_picky, save_text
from tests.serve.engine.execution.test_batch_invariance import WAITS, loaded
from tests.serve.model_control.controlled import loader
from tests.serve.running_server import running_server

NOT_TRIED_OUT = 'parameters { key: "halfserve.warm_up" value { string_value: "off" } }'


WEIGHTS: dict[str, Array] = {"zero": np.zeros(1, np.int64), "axis": np.array(0), "much": np.array(40, np.float32)}


def save(root: Path, text: str) -> Path:
    """The model "m", of the inputs and outputs before ": " and the nodes after it."""
    interface, _, nodes = text.partition(": ")
    used = {name: array for name, array in WEIGHTS.items() if name in nodes}
    save_text(root / "m" / "1" / "model.onnx", f"{interface} {{ {nodes} }}", **used)
    return root


ROWS, WHOLE = "(float[n, 4] x) => (float[n, 4] y)", "(float[n, 4] x) => (int64[n, 4] y)"
CENTRED = f"{ROWS}: m = ReduceMean(x, zero)  y = Sub(x, m)"
MIXING = {
    "a mean over rows": CENTRED,
    "a softmax over rows": f"{ROWS}: y = Softmax<axis = 0>(x)",
    "a sum of the rows before": f"{ROWS}: y = CumSum(x, axis)",
    "the largest row": f"{ROWS}: m = ReduceMax(x, zero)  y = Sub(x, m)",
    "a mean over rows of whole numbers": (
        "(int64[n, 4] x) => (float[n, 4] y): f = Cast<to = 1>(x)  m = ReduceMean(f, zero)  y = Sub(f, m)"
    ),
    "a place among all rows": f"{WHOLE}: m = ReduceMin(x, zero)  e = Equal(x, m)  y = Cast<to = 7>(e)",
}
QUANTISED = "q, s, z = DynamicQuantizeLinear(x)"
INDEPENDENT = {
    "a softmax of a row": f"{ROWS}: y = Softmax<axis = 1>(x)",
    "a class": "(float[n, 4] x) => (int64[n] y): y = ArgMax<axis = 1, keepdims = 0>(x)",
    "chance": f"{ROWS}: y = RandomNormalLike(x)",
    "no number": f"{ROWS}: d = Sub(x, x)  y = Div(d, d)",
    # int8 scales are taken over all rows, which is a rounding's difference.
    "dynamically quantised": f"{ROWS}: {QUANTISED}  y = DequantizeLinear(q, s, z)",
    # A picture's, say, of which a third is a step brighter or darker for it.
    "dynamically quantised, in whole numbers": (
        f"{WHOLE}: {QUANTISED}  d = DequantizeLinear(q, s, z)  m = Mul(d, much)  y = Cast<to = 7>(m)"
    ),
}


def looked_at(root: Path, config: str = WAITS) -> Model:
    version = loaded(root, config)
    check_batch_invariance(TriedVersion(version, budget_s=60))
    return version


def joins(version: Model) -> bool:
    assert version.invariance is not None
    return version.invariance.is_safe


def is_in_doubt(version: Model) -> bool:
    assert version.invariance is not None
    return version.invariance.is_doubtful


@pytest.mark.parametrize("name", MIXING)
def test_rows_that_depend_on_each_other_are_not_joined(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    assert not joins(looked_at(save(tmp_path, MIXING[name])))
    (message,) = caplog.messages
    assert message.startswith(
        "m/1: output 'y' of a row depends on the other rows of its batch; its requests are computed one by"
    )


@pytest.mark.parametrize("name", INDEPENDENT)
def test_rows_that_do_not_are(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    assert joins(looked_at(save(tmp_path, INDEPENDENT[name])))
    assert not caplog.messages


@pytest.mark.parametrize("save_usual", [save_mlp, save_picky])
def test_nor_is_a_usual_model_suspected(tmp_path: Path, save_usual: Callable[[Path], Path]) -> None:
    save_usual(tmp_path / "m" / "1" / "model.onnx")
    assert joins(looked_at(tmp_path))


def test_a_declared_batch_size_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert joins(looked_at(save(tmp_path, CENTRED), f"max_batch_size: 8 {WAITS}"))
    assert "requests that share one change each other's answers, as max_batch_size allows" in caplog.text


@pytest.mark.parametrize(
    "config",
    ["max_batch_size: 0", "max_batch_size: 1", NOT_TRIED_OUT],
)
def test_where_nothing_is_joined_or_tried_out_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: str
) -> None:
    looked_at(save(tmp_path, CENTRED), config)
    assert not caplog.messages


def test_nothing_is_run_that_memory_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tried_version, "available_bytes", lambda: 1)
    version = looked_at(save(tmp_path, CENTRED))
    assert joins(version)
    assert is_in_doubt(version)


@pytest.mark.parametrize(
    ("config", "doubt"), [(NOT_TRIED_OUT, True), (f"max_batch_size: 8 {NOT_TRIED_OUT}", False), ("", False)]
)
def test_only_unchecked_models_are_doubtful(tmp_path: Path, config: str, doubt: bool) -> None:
    save_mlp(tmp_path / "m" / "1" / "model.onnx")
    version = looked_at(tmp_path, config)
    assert joins(version)
    assert is_in_doubt(version) is doubt


def test_where_a_look_could_take_a_copy_down_requests_stay_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given_up = 'parameters { key: "halfserve.max_compute_s" value { string_value: "2" } }'
    version = looked_at(save(tmp_path, CENTRED), NOT_TRIED_OUT + given_up)
    assert not joins(version)
    (message,) = caplog.messages
    assert "was not found out (halfserve.warm_up is off); its requests are computed one by one" in message


def test_a_model_that_takes_long_is_not_run_for_longer_than_there_is_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    version = loaded(save(tmp_path, CENTRED), WAITS)
    ran = list[float]()

    class Slow(TriedVersion):
        def run(self, backend: Backend, batch: TrialBatch) -> Answered | Failed:
            ran.append(10.0 * (len(ran) + 1))
            return super().run(backend, batch)

    tried = Slow(version, budget_s=15)
    tried.clock = lambda: ran[-1] if ran else 0.0
    check_batch_invariance(tried)
    assert ran == [10, 20]
    assert joins(version)
    assert is_in_doubt(version)
    assert not caplog.messages


@pytest.mark.parametrize("config", [WAITS, WAITS + NOT_TRIED_OUT])
def test_clients_that_ask_at_once_get_what_each_gets_alone(tmp_path: Path, config: str) -> None:
    (save(tmp_path, CENTRED) / "m" / "config.pbtxt").write_text(config)
    (files,) = find_models(tmp_path)
    answers: list[list[list[float]]] = []

    def ask(address: str, factor: float) -> None:
        with triton.InferenceServerClient(address) as client:
            x = triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.full((1, 4), factor, np.float32))
            answers.append(client.infer("m", [x]).as_numpy("y").tolist())

    with running_server(lambda: [started(loader().load(files))]) as server:
        threads = [threading.Thread(target=ask, args=(server.address, factor)) for factor in (1.0, -7.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert answers == [[[0.0] * 4]] * 2


@given(
    hnp.arrays(np.float32, (2, 3), elements=st.floats(-1000, 1000, width=32)),
    st.floats(-ALIKE / 2, ALIKE / 2),
)
def test_roundings_are_no_difference(array: Array, share: float) -> None:
    assert not differ(array, array * np.float32(1 + share))


def test_incomparable_outputs_do_not_differ() -> None:
    assert not differ(np.array([np.nan, np.inf]), np.array([1.0, 2.0]))
    assert not differ(np.zeros((0, 3)), np.zeros((0, 3)))
    assert not differ(np.array([b"a"], object), np.array([b"b"], object))
    assert not differ(np.zeros(2), np.zeros(3))
    assert differ(np.array([np.nan, 1.0]), np.array([np.nan, 2.0]))
