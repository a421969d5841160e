from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.serve.engine.errors import (
    BackendError,
    FailedPreconditionError,
    InvalidArgumentError,
    NonFiniteError,
    OverloadedError,
    QueueFullError,
    RequestCancelledError,
)
from halfserve.serve.engine.inference_core import ON_DEMAND, InferenceCore
from halfserve.serve.engine.model import VersionState
from halfserve.serve.engine.model_statistics import BatchTimes, LatencyFigures
from halfserve.serve.engine.precision_guard.guard import GuardPolicy, PrecisionGuard
from halfserve.serve.engine.precision_guard.tally import DriftHistogram, GuardCounters, OutputCounters
from halfserve.serve.observability.exposition import STATES_TOGETHER, TOGETHER, CpuMetrics, exposition, find_nvml, gpu_metrics
from halfserve.serve.observability.metrics import histogram_metric, latency_figures, number
from halfserve.serve.observability.model_metrics import model_metrics
from halfserve.serve.observability.observe_options import ObserveOptions
from halfserve.serve.protocol.service import INFER_PATH
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.engine.sequences.scene import Scene, play, sum_model
from tests.serve.engine.sequences.test_slot_batches import telling_model
from tests.serve.observability.conftest import CLIENT_TIMEOUT_S, Serving, index, row
from tests.serve.observability.metric_text import declared_readings, to_text

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
MLP = {"model": "mlp", "version": "3"}


def read(text: str) -> Samples:
    """Every sample by name and labels, after Prometheus' own parser, which would end the names of counters in _total."""
    metrics = text_string_to_metric_families(text.replace(" counter\n", " untyped\n"))
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for metric in metrics for s in metric.samples}


def value(samples: Samples, name: str, labels: dict[str, str]) -> float:
    return samples[name, tuple(sorted(labels.items()))]


async def scrape(core: InferenceCore) -> Samples:
    body, content_type = await exposition(core)
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    return read(body.decode())


def test_the_figures_are_those_of_the_statistics(serving: Serving) -> None:
    with serving(ObserveOptions()) as server, triton.InferenceServerClient(server.address) as client:
        for rows in (1, 3, 3):
            client.infer("mlp", row(rows), client_timeout=CLIENT_TIMEOUT_S)
        with pytest.raises(InferenceServerException):
            client.infer("picky", index(7), client_timeout=CLIENT_TIMEOUT_S)
        with pytest.raises(InferenceServerException):
            client.infer("mlp", row(width=5), client_timeout=CLIENT_TIMEOUT_S)
        told = client.get_inference_statistics("mlp", "3", as_json=True)["model_stats"][0]
        samples = server.run(scrape(server.core))
    for name, expected in {
        "nv_inference_request_success": told["inference_stats"]["success"]["count"],
        "nv_inference_count": told["inference_count"],
        "nv_inference_exec_count": told["execution_count"],
        "nv_inference_request_duration_us": int(told["inference_stats"]["success"]["ns"]) // 1000,
        "nv_inference_queue_duration_us": int(told["inference_stats"]["queue"]["ns"]) // 1000,
        "nv_inference_compute_input_duration_us": int(told["inference_stats"]["compute_input"]["ns"]) // 1000,
        "nv_inference_compute_infer_duration_us": int(told["inference_stats"]["compute_infer"]["ns"]) // 1000,
        "nv_inference_compute_output_duration_us": int(told["inference_stats"]["compute_output"]["ns"]) // 1000,
        "nv_inference_pending_request_count": 0,
        "halfserve_queue_depth": 0,
        "halfserve_batch_rows_sum": 7,
        "halfserve_batch_rows_count": 3,
        "halfserve_model_instances": 1,
        "halfserve_model_instances_up": 1,
        "halfserve_model_instance_restarts_total": 0,
    }.items():
        assert value(samples, name, MLP) == int(expected), name
    assert value(samples, "halfserve_batch_rows_bucket", MLP | {"le": "2"}) == 1
    for stage in ("queue", "compute_input", "compute_infer", "compute_output", "total"):
        assert value(samples, "halfserve_request_stage_seconds_count", MLP | {"stage": stage}) == 3
    total_s = value(samples, "halfserve_request_stage_seconds_sum", MLP | {"stage": "total"})
    assert total_s * 1e9 == pytest.approx(int(told["inference_stats"]["success"]["ns"]))
    assert value(samples, "nv_inference_request_failure", {"model": "picky", "version": "1", "reason": "BACKEND"}) == 1
    assert value(samples, "halfserve_requests_failed_total", {"model": "picky", "version": "1", "reason": "backend"}) == 1
    assert value(samples, "halfserve_requests_refused_total", {"reason": "invalid_argument"}) == 1
    info = MLP | {"provider": "CPUExecutionProvider", "precision": "fp32 (the fp16 model, upcast)"}
    assert value(samples, "halfserve_model_info", info) == 1
    assert value(samples, "halfserve_model_state", MLP | {"state": "READY"}) == 1
    assert value(samples, "halfserve_model_state", MLP | {"state": "LOADING"}) == 0
    assert value(samples, "halfserve_ready", {}) == 1
    assert value(samples, "process_resident_memory_bytes", {}) > 1e6


def test_messages_of_clients_are_counted_by_their_sizes(serving: Serving) -> None:
    requests = [ModelInferRequest(model_name="mlp", raw_input_contents=[bytes(128 * rows)]) for rows in (1, 3, 3)]
    for request in requests:
        request.inputs.add(name="x", datatype="FP16", shape=[len(request.raw_input_contents[0]) // 128, 64])
    sent = [request.SerializeToString() for request in requests]
    with serving(ObserveOptions()) as server, grpc.insecure_channel(server.address) as channel:
        infer = channel.unary_unary(INFER_PATH)
        got = [infer(request, timeout=CLIENT_TIMEOUT_S) for request in sent]
        with pytest.raises(grpc.RpcError):
            infer(sent[0] + ModelInferRequest(raw_input_contents=[b""]).SerializeToString(), timeout=CLIENT_TIMEOUT_S)
        samples = server.run(scrape(server.core))
    assert value(samples, "halfserve_request_bytes_total", MLP) == sum(map(len, sent))
    assert value(samples, "halfserve_response_bytes_total", MLP) == sum(map(len, got))


def test_the_fast_transport_tells_its_connections(serving: Serving) -> None:
    with serving(ObserveOptions()) as server, grpc.insecure_channel(server.address) as channel:
        channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=CLIENT_TIMEOUT_S)
        samples = server.run(scrape(server.core))
    connections = samples.get(("halfserve_connections", ()))
    assert connections == (1 if "halfserve_connections" in server.core.figures.readings else None)
    assert (samples.get(("halfserve_calls", ())) is None) == (connections is None)


async def test_each_reading_is_a_metric_of_its_kind() -> None:
    core = InferenceCore([])
    for kind, name, text in declared_readings():
        getattr(core.figures, kind)(name, text, lambda: 7)
    lines = set((await exposition(core))[0].decode().splitlines())
    assert len(declared_readings()) > 9
    for kind, name, text in declared_readings():
        assert name.endswith("_total") == (kind == "counter")
        assert {f"# HELP {name} {text}", f"# TYPE {name} {kind}"} <= lines
        assert f"{name} 7" in lines


def scrape_with(prepare: Any) -> Samples:
    """The exposition of a server with one model, after something was done to it."""

    async def run() -> Samples:
        model = held_model(HeldBackend())
        core = InferenceCore([model])
        prepare(model)
        try:
            return await scrape(core)
        finally:
            await core.drain()

    return asyncio.run(run())


def test_failures_have_tritons_reasons_and_our_own() -> None:
    def fail(model: Any) -> None:
        refused = QueueFullError("full", retry_after_s=1), OverloadedError("late", retry_after_s=1)
        own = BackendError("broken"), InvalidArgumentError("as the model says"), NonFiniteError("NaN")
        behind = RequestCancelledError("a request before it"), FailedPreconditionError("a request before it")
        for error in (None, None, *refused, *own, *behind):
            model.statistics.failed(0, error)

    samples, held = scrape_with(fail), {"model": "held", "version": "1"}
    expected = {"REJECTED": 2, "CANCELED": 3, "BACKEND": 3, "OTHER": 1}
    assert {r: value(samples, "nv_inference_request_failure", held | {"reason": r}) for r in expected} == expected
    own = {"queue_full": 1, "cancelled": 2, "backend": 1, "deadline_exceeded": 0, "out_of_memory": 0}
    assert {r: value(samples, "halfserve_requests_failed_total", held | {"reason": r}) for r in own} == own


@pytest.mark.parametrize("make", [sum_model, telling_model])  # strategies: oldest, and direct with a row for each sequence
def test_requests_that_wait_in_their_sequences_are_pending(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    def pending(scene: Scene) -> float:
        labels = {"model": scene.model.name, "version": "1"}
        text = to_text(metric for _, metric in model_metrics([scene.model]))
        return value(read(text), "nv_inference_pending_request_count", labels)

    async def test(scene: Scene) -> None:
        await scene.hold()
        answers = [scene.send(key, 1, start=True) for key in (1, 2)]
        await scene.until_computing()
        answers += [scene.send(key, 1, start=key == 3) for key in (1, 2, 1, 3)]
        assert pending(scene) == 4
        scene.held.release.set()
        await asyncio.gather(*answers)
        assert pending(scene) == 0

    play(make(tmp_path), test)


def test_labels_are_in_order_with_the_bucket_last() -> None:
    metric = Metric("seconds", "Seconds", "histogram")
    metric.add_sample("seconds_bucket", {"version": "1", "model": "m", "stage": "queue", "le": "1"}, 2)
    assert to_text([metric]).splitlines()[-1] == 'seconds_bucket{model="m",stage="queue",version="1",le="1"} 2'


def test_the_pool_of_pinned_memory_is_told_as_there_is_none() -> None:
    samples = scrape_with(lambda _: None)
    assert [samples[f"nv_pinned_memory_pool_{what}_bytes", ()] for what in ("total", "used")] == [0, 0]


def test_refusal_counters_exist_before_the_first_refusal() -> None:
    samples = scrape_with(lambda _: None)  # Prometheus sees no growth in a counter that comes with what it has counted
    for reason in ("invalid_argument", "not_found", "rate_limited", "unauthenticated", "unavailable"):
        assert value(samples, "halfserve_requests_refused_total", {"reason": reason}) == 0


def test_the_guards_counters_are_there() -> None:
    drift = DriftHistogram(bounds=(0.001, 0.1), counts=(5, 3, 1), total=0.75)
    output = OutputCounters(non_finite_values=40, non_finite_requests=4, from_inputs=2, drift=drift, rows_compared=9)
    counters = GuardCounters(policy="fallback", outputs={"y": output}, fallbacks=4, shadow_runs=9, degraded=True)

    def guard(model: Any) -> None:
        tally: Any = SimpleNamespace(counters=lambda: counters)
        model.guard = PrecisionGuard((), tally, policy=GuardPolicy.COUNT, batched=True)

    samples, held = scrape_with(guard), {"model": "held", "version": "1"}
    assert value(samples, "halfserve_guard_fallbacks_total", held) == 4
    assert value(samples, "halfserve_guard_degraded", held | {"policy": "fallback"}) == 1
    y = held | {"output": "y"}
    assert value(samples, "halfserve_guard_non_finite_values_total", y) == 40
    assert value(samples, "halfserve_guard_non_finite_inputs_total", y) == 2
    assert [value(samples, "halfserve_guard_drift_bucket", y | {"le": le}) for le in ("0.001", "0.1", "+Inf")] == [5, 8, 9]
    assert value(samples, "halfserve_guard_drift_sum", y) == 0.75


async def test_a_scrape_of_many_models_yields_to_the_event_loop() -> None:
    core = InferenceCore([held_model(HeldBackend(), name=f"m{number}") for number in range(4 * TOGETHER + 1)])
    telling = asyncio.create_task(exposition(core))
    turns = 0
    while not telling.done():
        await asyncio.sleep(0)
        turns += 1
    await core.drain()
    body, _ = await telling
    text = body.decode()
    assert turns >= 5
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    parts = [line.partition("{")[0] for line in text.splitlines() if line.startswith("halfserve_queue_depth{")]
    assert len(parts) == 4 * TOGETHER + 1
    together = text[text.index("halfserve_queue_depth{") : text.rindex("halfserve_queue_depth{")]
    assert "# HELP" not in together


async def test_a_scrape_of_many_states_yields_to_the_event_loop() -> None:
    core = InferenceCore([])
    for count in range(3 * STATES_TOGETHER + 1):
        core.states.set(f"m{count}", 1, VersionState.LOADING)
    telling = asyncio.create_task(exposition(core))
    turns = 0
    while not telling.done():
        await asyncio.sleep(0)
        turns += 1
    text = telling.result()[0].decode()
    assert turns >= 4
    assert text.count("# TYPE halfserve_model_state gauge") == 1
    assert text.count('state="LOADING",version="1"} 1') == 3 * STATES_TOGETHER + 1


async def test_models_that_are_available_on_demand_raise_no_alert() -> None:
    core = InferenceCore([])
    core.states.set("resting", 1, VersionState.UNAVAILABLE, ON_DEMAND)
    core.states.set("refused", 1, VersionState.UNAVAILABLE, "corrupt")
    samples = await scrape(core)
    assert {dict(labels)["model"] for name, labels in samples if name == "halfserve_model_state"} == {"refused"}


def test_the_machines_figures_are_shares_and_bytes(tmp_path: Path) -> None:
    stat, meminfo = tmp_path / "stat", tmp_path / "meminfo"
    stat.write_text("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 1 1\n")
    meminfo.write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 250 kB\n")
    cpu = CpuMetrics(tmp_path)
    assert read(to_text(cpu.collect()))["nv_cpu_utilization", ()] == 0.2
    stat.write_text("cpu  150 0 125 725 100 0 0 0 0 0\n")
    samples = read(to_text(cpu.collect()))
    assert samples["nv_cpu_utilization", ()] == 0.75
    assert samples["nv_cpu_memory_total_bytes", ()] == 1_024_000
    assert samples["nv_cpu_memory_used_bytes", ()] == 768_000
    assert list(CpuMetrics(tmp_path / "none").collect()) == []


async def test_a_model_name_cannot_break_the_format() -> None:
    name = 'a"} 1\nnv_fake 2\\'

    core = InferenceCore([held_model(HeldBackend(), name)])
    samples = await scrape(core)
    await core.drain()
    assert value(samples, "nv_inference_count", {"model": name, "version": "1"}) == 0
    assert ("nv_fake", ()) not in samples
    assert np.isfinite(list(samples.values())).all()


class NoFigureError(Exception):
    pass


def missing() -> int:
    raise NoFigureError


def two_gpus(**other: Any) -> Any:
    """The part of pynvml that is asked: two devices, the second without figures of its energy."""
    functions: dict[str, Any] = {
        "NVMLError": NoFigureError,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda device: b"GPU-b" if device else "GPU-a",
        "nvmlDeviceGetUtilizationRates": lambda device: SimpleNamespace(gpu=50 + device),
        "nvmlDeviceGetMemoryInfo": lambda device: SimpleNamespace(total=150_754_820_096, used=1_048_576 + device),
        "nvmlDeviceGetPowerUsage": lambda _: 75_500,
        "nvmlDeviceGetEnforcedPowerLimit": lambda _: 700_000,
        "nvmlDeviceGetTotalEnergyConsumption": lambda device: missing() if device else 12_345,
    }
    return SimpleNamespace(**functions | other)


def test_gpu_figures_are_as_perf_analyzer_reads_them() -> None:
    lines = figures_of(two_gpus())
    assert lines == [
        'nv_gpu_utilization{gpu_uuid="GPU-a"} 0.5',
        'nv_gpu_utilization{gpu_uuid="GPU-b"} 0.51',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-a"} 150754820096',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-b"} 150754820096',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-a"} 1048576',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-b"} 1048577',
        'nv_gpu_power_usage{gpu_uuid="GPU-a"} 75.5',
        'nv_gpu_power_usage{gpu_uuid="GPU-b"} 75.5',
        'nv_gpu_power_limit{gpu_uuid="GPU-a"} 700',
        'nv_gpu_power_limit{gpu_uuid="GPU-b"} 700',
        'nv_energy_consumption{gpu_uuid="GPU-a"} 12.345',
    ]
    assert all(re.fullmatch(r'\w+\{gpu_uuid="[^"]+"\} \d+(\.\d+)?', line) for line in lines)


def figures_of(nvml: Any) -> list[str]:
    return [line for line in to_text(gpu_metrics(nvml)).splitlines() if not line.startswith("#")]


def test_a_device_that_is_lost_does_not_take_the_others_figures_with_it() -> None:
    lines = figures_of(two_gpus(nvmlDeviceGetHandleByIndex=lambda index: index or missing()))  # the first is off the bus
    assert lines[0] == 'nv_gpu_utilization{gpu_uuid="GPU-b"} 0.51'
    assert not any("GPU-a" in line for line in lines)
    assert figures_of(two_gpus(nvmlDeviceGetCount=missing)) == []  # as while the driver is updated


def test_without_the_library_there_are_no_figures() -> None:
    assert list(gpu_metrics(None)) == []


@pytest.mark.gpu
def test_a_real_device_tells_its_figures() -> None:
    nvml = find_nvml()
    if nvml is None:
        pytest.skip("needs a CUDA device and the package nvidia-ml-py")
    text = to_text(gpu_metrics(nvml))
    for name in ("nv_gpu_utilization", "nv_gpu_power_usage", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes"):
        assert re.search(rf'^{name}\{{gpu_uuid="GPU-[0-9a-f-]+"\}} \d+(\.\d+)?$', text, re.MULTILINE)


def gauge(name: str, labels: dict[str, str], value: float) -> Metric:
    metric = Metric(name, "A figure\nof a kind \\", "gauge")
    metric.add_sample(name, labels, value)
    return metric


@given(st.text(), st.floats() | st.integers(-(2**53), 2**53))
def test_what_is_written_reads_back(label: str, value: float) -> None:
    (metric,) = text_string_to_metric_families(to_text([gauge("some_figure", {"model": label, "version": "1"}, value)]))
    (sample,) = metric.samples
    assert sample.labels == {"model": label, "version": "1"}
    assert math.isclose(sample.value, value, abs_tol=1e-20) or (math.isnan(value) and math.isnan(sample.value))
    assert metric.documentation == "A figure\nof a kind \\"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (150_754_820_096, "150754820096"),
        (1.5e11, "150000000000"),
        (0.25, "0.25"),
        (1e-05, "0.00001"),
        (float("inf"), "+Inf"),
        (float("-inf"), "-Inf"),
        (float("nan"), "NaN"),
    ],
)
def test_numbers_are_plain_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_counter_keeps_the_name_of_its_samples() -> None:
    triton, ours = Metric("nv_inference_count", "Rows", "counter"), Metric("halfserve_lost", "Lost", "counter")
    triton.add_sample("nv_inference_count", {}, 3)
    ours.add_sample("halfserve_lost_total", {"reason": "full"}, 4)
    assert to_text([triton, Metric("empty", "Nothing", "gauge"), ours]) == (
        "# HELP nv_inference_count Rows\n# TYPE nv_inference_count counter\nnv_inference_count 3\n"
        '# HELP halfserve_lost_total Lost\n# TYPE halfserve_lost_total counter\nhalfserve_lost_total{reason="full"} 4\n'
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), LatencyFigures()),
        (("summary_latencies=true",), LatencyFigures(quantiles=(0.5, 0.9, 0.95, 0.99, 0.999))),
        (("histogram_latencies=true",), LatencyFigures(has_histograms=True)),
        (("summary_latencies=true", "summary_quantiles=0.1:0.0.1,0.7"), LatencyFigures(quantiles=(0.1, 0.7))),
        (("summary_quantiles=0.1:0.01", "counter_latencies=false"), LatencyFigures(has_counters=False)),
    ],
    ids=range(5),
)
def test_settings_of_metrics_are_read_as_in_triton(settings: tuple[str, ...], expected: LatencyFigures) -> None:
    assert latency_figures(settings) == expected


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("histograms=true", "has the setting 'histograms', expected one of: counter_latencies, histogram_latencies, su"),
        ("summary_latencies=yes", "summary_latencies is 'yes', expected true or false"),
        ("summary_quantiles=0.5:0.1,99", "summary_quantiles has '99', expected QUANTILE:ERROR with a quantile of 0 to 1"),
    ],
    ids=range(3),
)
def test_wrong_settings_of_metrics_are_refused(setting: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        latency_figures([setting])


def test_the_first_response_has_a_histogram_with_tritons_buckets() -> None:
    model = held_model(HeldBackend(), "m")
    for ms in (100, 300, 6000):
        end = ms * 10**6
        model.statistics.batch_done(BatchTimes(started=0, assembled=0, computed=end, split=end), [0], 1)
    metric = histogram_metric([model])
    found = {(one.name.removeprefix(metric.name), one.labels.get("le")): one.value for one in metric.samples}
    buckets = (("100", 1), ("500", 2), ("2000", 2), ("5000", 2), ("+Inf", 3))
    expected: dict[tuple[str, str | None], float] = {("_bucket", edge): count for edge, count in buckets}
    assert found == expected | {("_sum", None): 6400, ("_count", None): 3}
