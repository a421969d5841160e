"""What the guard does with non-finite answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from halfserve.protos.datatypes import BY_WIRE
from halfserve.serve.engine.backend import Backend
from halfserve.serve.engine.execution.batch import run_batch
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.precision_guard.guard import GuardPolicy, GuardVerdict, PrecisionGuard
from halfserve.serve.engine.precision_guard.tally import KEPT_EVENTS, LEAST_RUNS, Degradation, Distance, GuardCounters, Tally
from halfserve.serve.engine.precision_guard.twin import Fallback, Fp32Twin
from halfserve.serve.engine.requests import InferRequest, RemarkedAnswer
from halfserve.serve.engine.results import Answered, Failed
from halfserve.serve.engine.tensors import Array, Tensors, TensorSpec
from tests.serve.engine.fakes import Computing, FakeBackend
from tests.serve.engine.precision_guard.guarded_models import load, write_table, write_thousandfold
from tests.serve.http.running_http import running_http
from tests.serve.running_server import RunningServer, running_server
from tests.serve.runtimes import RUNTIMES

TWIN_VALUE = 7.0


class Constant(FakeBackend):
    """A twin that answers `value` in "y" and 3 in "n", `rows_each` per row; fails where x is 13."""

    def __init__(self, value: float = TWIN_VALUE, *, rows_each: int = 1) -> None:
        self.rows: list[int] = []  # rows of each run
        self._value = value
        self._rows_each = rows_each

    def run(self, inputs: Tensors) -> Tensors:
        x = inputs["x"]
        self.rows.append(len(x))
        if (x == 13).any():
            raise ValueError("thirteen")
        rows = len(x) * self._rows_each
        return {"y": np.full((rows, 2), self._value, np.float32), "n": np.full((rows, 1), 3, np.int64)}


def guard_of(policy: GuardPolicy, twin: Backend | None = None, *, batched: bool = True) -> PrecisionGuard:
    specs = [
        TensorSpec(name="y", datatype=BY_WIRE["FP16"], shape=(-1, 2)),
        TensorSpec(name="n", datatype=BY_WIRE["INT64"], shape=(-1, 1)),
    ]
    fallback = None if twin is None else Fallback(Fp32Twin(lambda: twin))
    return PrecisionGuard(specs, Tally("m/1", policy, ["y", "n"], None), policy=policy, batched=batched, fallback=fallback)


def judged(guard: PrecisionGuard, requests: Sequence[InferRequest], inputs: Tensors, outputs: Tensors) -> GuardVerdict:
    """What the guard changes in a batch, of which it changes something."""
    verdict = guard.after(requests, inputs, outputs)
    assert verdict is not None
    return verdict


def batch(
    *rows: int, outputs: tuple[str, ...] = ("y", "n"), bad: tuple[int, ...] = ()
) -> tuple[Any, Tensors, dict[str, Array]]:
    """Requests with the given rows; every input and output is 1, except "y" in the bad rows."""
    requests = [InferRequest({}, outputs, count, None, None, lambda _: None) for count in rows]
    total = sum(rows)
    y = np.ones((total, 2), np.float16)
    y[list(bad), 1] = np.nan
    return requests, {"x": np.ones((total, 1), np.float16)}, {"y": y, "n": np.ones((total, 1), np.int64)}


def test_finite_answers_pass() -> None:
    guard = guard_of(GuardPolicy.REJECT)
    assert guard.after(*batch(1, 2)) is None
    assert guard.counters().outputs["y"].non_finite_values == 0


def test_each_request_is_judged_by_its_own_rows() -> None:
    verdict = judged(guard_of(GuardPolicy.REJECT), *batch(2, 3, 1, bad=(2, 4)))
    assert list(verdict.rejected) == [1]
    assert str(verdict.rejected[1]).startswith("output 'y' holds 2 of 6 values that are NaN or infinite, though every input is")


def test_requests_with_bad_inputs_are_let_be_and_counted_apart() -> None:
    requests, inputs, outputs = batch(2, 1, 3, 1, bad=(1, 2, 4, 6))
    inputs["x"][[0, 3]] = np.inf  # rows of the first and the third
    guard = guard_of(GuardPolicy.REJECT)
    verdict = judged(guard, requests, inputs, outputs)
    assert sorted(verdict.rejected) == [1, 3]
    counted = guard.counters().outputs["y"]
    assert (counted.non_finite_requests, counted.non_finite_values, counted.from_inputs) == (2, 2, 2)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("bad", [{"x": np.full((1, 1), np.nan)}, {"z": np.full((1, 1), np.inf)}], ids=["all", "one"])
def test_a_request_alone_with_bad_inputs_is_let_be(batched: bool, bad: dict[str, Array]) -> None:
    requests, inputs, outputs = batch(1, bad=(0,))
    guard = guard_of(GuardPolicy.REJECT, batched=batched)
    assert guard.after(requests, {**inputs, **bad}, outputs) is None
    assert guard.counters().outputs["y"].from_inputs == 1


def test_padding_rows_are_not_judged() -> None:
    requests, inputs, outputs = batch(2, 1, bad=(2,))
    guard = guard_of(GuardPolicy.REJECT)
    assert guard.after(requests[:1], inputs, outputs) is None
    assert guard.counters().outputs["y"].non_finite_values == 0


def test_an_unrequested_output_is_only_counted() -> None:
    guard = guard_of(GuardPolicy.REJECT)
    assert guard.after(*batch(1, outputs=("n",), bad=(0,))) is None
    counters = guard.counters()
    assert (counters.outputs["y"].non_finite_values, counters.rejected) == (1, 0)


def test_the_twin_answers_exactly_the_bad_requests_in_one_run() -> None:
    twin = Constant()
    requests, inputs, outputs = batch(2, 1, 3, bad=(0, 5))
    before = {name: array.copy() for name, array in outputs.items()}
    verdict = judged(guard_of(GuardPolicy.FALLBACK, twin), requests, inputs, outputs)
    assert twin.rows == [5]
    assert verdict.outputs["y"].tolist() == [[7, 7]] * 2 + [[1, 1]] + [[7, 7]] * 3
    assert verdict.outputs["n"].ravel().tolist() == [3, 3, 1, 3, 3, 3]
    assert verdict.outputs["y"].dtype == np.float16
    assert [r.response_parameters for r in requests] == [{"halfserve.precision": "fp32"}, None, {"halfserve.precision": "fp32"}]
    assert all(np.array_equal(outputs[name], before[name], equal_nan=True) for name in outputs)


def test_each_request_gets_the_twins_answer_to_its_rows() -> None:
    telling = Computing(lambda inputs: {"y": np.repeat(inputs["x"], 2, axis=1), "n": inputs["x"].astype(np.int64)})
    requests, inputs, outputs = batch(2, 1, 3, 2, bad=(0, 4, 7))
    inputs["x"][:, 0] = np.arange(8) + 20
    verdict = judged(guard_of(GuardPolicy.FALLBACK, telling), requests, inputs, outputs)
    assert verdict.outputs["y"][:, 0].tolist() == [20, 21, 1, 23, 24, 25, 26, 27]


def test_a_request_that_is_rejected_has_no_other_end() -> None:
    overflowing = Computing(lambda inputs: {"y": np.where(inputs["x"] == 2, np.inf, inputs["x"]).astype(np.float16)})
    requests = [InferRequest({"x": np.full((1, 2), x, np.float32)}, ("y",), 1, None, None, lambda _: None) for x in range(4)]
    results = run_batch(overflowing, requests, guard_of(GuardPolicy.REJECT))
    failed, answered = results
    assert isinstance(failed, Failed)
    assert failed.request is requests[2]
    assert isinstance(answered, Answered)
    assert answered.requests == [requests[0], requests[1], requests[3]]
    assert [answer["y"].tolist() for answer in answered.answers] == [[[0, 0]], [[1, 1]], [[3, 3]]]
    assert not any(isinstance(answer, RemarkedAnswer) for answer in answered.answers)


def test_a_model_without_a_batch_dimension_is_answered_whole() -> None:
    requests, inputs, outputs = batch(2, bad=(1,))
    assert guard_of(GuardPolicy.FALLBACK, Constant(), batched=False).after(*batch(2)) is None
    verdict = judged(guard_of(GuardPolicy.FALLBACK, Constant(), batched=False), requests, inputs, outputs)
    assert verdict.outputs["y"].tolist() == [[7, 7]] * 2


def test_a_request_computed_alone_has_all_rows_that_it_gets() -> None:
    (request,), inputs, _ = batch(1)
    _, _, outputs = batch(3, bad=(2,))  # as models answer that find boxes
    rejected = judged(guard_of(GuardPolicy.REJECT), [request], inputs, outputs).rejected
    assert str(rejected[0]).startswith("output 'y' holds 1 of 6 values that are NaN or infinite")
    verdict = judged(guard_of(GuardPolicy.FALLBACK, Constant(rows_each=3)), [request], inputs, outputs)
    assert (verdict.outputs["y"].tolist(), verdict.rejected) == ([[7, 7]] * 3, {})


def test_infinities_that_fp32_gives_too_are_answers() -> None:
    requests, inputs, outputs = batch(1, bad=(0,))
    verdict = judged(guard_of(GuardPolicy.FALLBACK, Constant(-np.inf)), requests, inputs, outputs)
    assert verdict.outputs["y"].tolist() == [[-np.inf, -np.inf]]
    assert not verdict.rejected


def test_a_twin_that_fails_fails_the_bad_requests_alone() -> None:
    requests, inputs, outputs = batch(1, 1, bad=(1,))
    inputs["x"][1] = 13
    verdict = judged(guard_of(GuardPolicy.FALLBACK, Constant()), requests, inputs, outputs)
    assert list(verdict.rejected) == [1]
    assert str(verdict.rejected[1]).endswith("though every input is finite; the fp32 twin failed on it too")


def test_a_twin_with_other_output_shapes_is_not_used() -> None:
    narrow = Computing(lambda inputs: {"y": np.zeros((1, 1), np.float32), "n": np.zeros((1, 1), np.int64)})
    verdict = judged(guard_of(GuardPolicy.FALLBACK, narrow), *batch(1, bad=(0,)))
    assert str(verdict.rejected[0]).endswith("the fp32 twin answers with output 'y' of another shape, [1, 1]")


def test_the_log_has_one_line_for_many_of_a_kind(caplog: pytest.LogCaptureFixture) -> None:
    guard = guard_of(GuardPolicy.COUNT)
    for _ in range(KEPT_EVENTS + 50):
        guard.after(*batch(1, bad=(0,)))
    assert caplog.messages == ["m/1: passed on: output 'y' holds 1 of 2 values that are NaN or infinite"]
    assert len(guard.recent_events()) == KEPT_EVENTS
    assert guard.counters().outputs["y"].non_finite_requests == KEPT_EVENTS + 50


@pytest.mark.parametrize("blocks", [False, True])
def test_a_degraded_model_is_not_ready_where_the_configuration_says_so(blocks: bool) -> None:
    tally = Tally("m/1", GuardPolicy.COUNT, ["y"], Degradation(0.01))
    guard = PrecisionGuard([], tally, policy=GuardPolicy.COUNT, batched=True, degraded_not_ready=blocks)
    assert not guard.blocks_readiness
    for _ in range(LEAST_RUNS):
        tally.shadow_run({"y": Distance(1.0, 1.0, 1, 1)})
    assert guard.degraded
    assert guard.blocks_readiness is blocks


@pytest.fixture(scope="module", params=RUNTIMES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Models "count", "reject", "fallback" and "off" (the table), "wide" (x 1000, fallback), "wide_reject", "shadowed"."""
    root = tmp_path_factory.mktemp("guarded")
    for policy in ("count", "reject", "fallback", "off"):
        write_table(root / policy, precision_guard=policy)
    write_thousandfold(root / "wide", precision_guard="fallback")
    write_thousandfold(root / "wide_reject", precision_guard="reject")
    write_thousandfold(root / "shadowed", shadow_rate="1", shadow_share="1")
    with running_server(lambda: load(root, RUNTIMES[request.param]())) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as connected:
        yield connected


def ask(client: triton.InferenceServerClient, model: str, array: Array, outputs: object = None) -> triton.InferResult:
    name, datatype = ("i", "INT64") if array.dtype == np.int64 else ("x", "FP16")
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return client.infer(model, [given], outputs=outputs, client_timeout=60)


def rows(*indices: int) -> Array:
    return np.array(indices, np.int64).reshape(-1, 1)


def model_of(server: RunningServer, name: str) -> Model:
    return server.call(lambda: server.core.model(name))


def counters(server: RunningServer, name: str) -> GuardCounters:
    guard = model_of(server, name).guard
    assert guard is not None
    return guard.counters()


def test_a_model_counts_by_default_and_passes_on(server: RunningServer, client: triton.InferenceServerClient) -> None:
    before = counters(server, "count")
    assert ask(client, "count", rows(0, 1, 1)).as_numpy("y").ravel().tolist() == [5.0, np.inf, np.inf]
    after = counters(server, "count")
    assert after.outputs["y"].non_finite_values - before.outputs["y"].non_finite_values == 2
    assert after.outputs["y"].non_finite_requests - before.outputs["y"].non_finite_requests == 1
    assert (after.rejected, after.fallbacks, after.policy) == (0, 0, "count")


def test_rejecting_fails_the_request_and_says_why(server: RunningServer, client: triton.InferenceServerClient) -> None:
    assert ask(client, "reject", rows(0)).as_numpy("y").ravel().tolist() == [5.0]
    with pytest.raises(InferenceServerException) as failed:
        ask(client, "reject", rows(1, 0))
    assert failed.value.status() == "StatusCode.INTERNAL"
    assert failed.value.message() == (
        "output 'y' holds 1 of 2 values that are NaN or infinite, though every input is finite; send inputs of the size "
        "that the model was verified with, or serve it with the guard's policy 'fallback'"
    )
    assert counters(server, "reject").rejected >= 1


def test_falling_back_answers_in_fp32_and_says_so(server: RunningServer, client: triton.InferenceServerClient) -> None:
    good, bad = ask(client, "fallback", rows(0)), ask(client, "fallback", rows(1, 0))
    assert not good.get_response().parameters
    assert bad.as_numpy("y").ravel().tolist() == [49_152.0, 5.0]
    assert bad.as_numpy("y").dtype == np.float16
    assert bad.get_response().parameters["halfserve.precision"].string_param == "fp32"
    assert counters(server, "fallback").fallbacks >= 1
    guard = model_of(server, "fallback").guard
    assert guard is not None
    event = guard.recent_events()[0]
    assert (event.model, event.kind) == ("fallback/1", "fallback")
    assert event.text == "answered in fp32: output 'y' holds 1 of 2 values that are NaN or infinite"
    assert event.time > 1.7e9


def test_an_answer_in_fp32_may_be_wanted_as_classes(client: triton.InferenceServerClient) -> None:
    wanted = [triton.InferRequestedOutput("y", class_count=1)]
    answer = ask(client, "fallback", rows(1), wanted)
    assert answer.as_numpy("y").ravel().tolist() == [b"49152.000000:0"]
    assert answer.get_response().parameters["halfserve.precision"].string_param == "fp32"


def test_an_answer_in_fp32_says_so_in_json_too(server: RunningServer) -> None:
    def asked(row: int) -> dict[str, Any]:
        body = {"inputs": [{"name": "i", "shape": [1, 1], "datatype": "INT64", "data": [row]}]}
        answer: dict[str, Any] = httpx.post(f"{url}/v2/models/fallback/infer", json=body, timeout=60).json()
        return answer

    with running_http(server) as rest:
        url = f"http://127.0.0.1:{rest.port}"
        good, bad = asked(0), asked(1)
    assert "parameters" not in good
    assert (bad["parameters"], bad["outputs"][0]["data"]) == ({"halfserve.precision": "fp32"}, [49_152.0])


def test_off_does_not_look(server: RunningServer, client: triton.InferenceServerClient) -> None:
    assert model_of(server, "off").guard is None
    assert ask(client, "off", rows(1)).as_numpy("y").ravel().tolist() == [np.inf]


def test_infinite_inputs_may_give_infinite_outputs(server: RunningServer, client: triton.InferenceServerClient) -> None:
    x = np.array([[1, np.inf, 2, np.nan]], np.float16)
    before = counters(server, "wide_reject").outputs["y"]
    assert np.array_equal(ask(client, "wide_reject", x).as_numpy("y"), [[1000, np.inf, 2000, np.nan]], equal_nan=True)
    after = counters(server, "wide_reject").outputs["y"]
    assert (after.non_finite_values, after.from_inputs) == (before.non_finite_values, before.from_inputs + 1)


def test_an_overflow_of_only_the_output_is_detected_on_the_cpu(
    server: RunningServer, client: triton.InferenceServerClient
) -> None:
    with pytest.raises(InferenceServerException, match="output 'y' holds 2 of 4 values that are NaN or infinite"):
        ask(client, "wide_reject", np.array([[1, 100, 65, -66]], np.float16))


def test_fp32_does_not_help_where_the_output_cannot_hold_the_number(client: triton.InferenceServerClient) -> None:
    with pytest.raises(
        InferenceServerException, match=r"in fp32 they are finite, but 1 of output 'y' are beyond float16's range"
    ):
        ask(client, "wide", np.array([[1, 100, 2, 3]], np.float16))


def test_shadow_runs_measure_the_drift(server: RunningServer, client: triton.InferenceServerClient) -> None:
    answers = [ask(client, "shadowed", np.array([[0.1, 0.2, 0.3, 7]], np.float16)).as_numpy("y") for _ in range(3)]
    assert all(answer.argmax() == 3 for answer in answers)
    guard = model_of(server, "shadowed").guard
    assert guard is not None
    assert guard._shadow is not None
    done = threading.Event()
    guard._shadow._worker.submit(done.set)  # type: ignore[union-attr]  # (started by the first sample)
    assert done.wait(60)
    counted = guard.counters()
    assert counted.shadow_runs + counted.shadow_dropped == 3
    output = counted.outputs["y"]
    assert output.drift is not None
    # fp16 rounds the products, and that by less than 2**-11 of the largest.
    assert sum(output.drift.counts) == counted.shadow_runs >= 1
    assert 0 < output.drift.total / counted.shadow_runs < 2**-11
    assert (output.rows_compared, output.rows_agreeing) == (counted.shadow_runs,) * 2
    assert (counted.degraded, counted.drift_threshold) == (False, 0.01)
