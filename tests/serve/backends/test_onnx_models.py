"""Which runtime computes an ONNX file on the CPU, and in which precision."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper

from halfserve.installation import install_hint
from halfserve.protos.certificates import certificate_entry, certificate_sha256, named_entry
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends import cpu_trials, onnx_models
from halfserve.serve.backends.cpu_trials import TrialResult, compared
from halfserve.serve.backends.onnx_models import passed_precisions
from halfserve.serve.backends.openvino.compiled_model import OpenVinoBackend
from halfserve.serve.backends.openvino.fitness import computed_halves
from halfserve.serve.backends.runtimes import Runtimes
from halfserve.serve.engine.backend import Backend, CpuPrecision, DevicePlacement
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.trials.decisions import Decisions
from tests.models import save_mlp, save_model

FP16, BF16, FP32 = TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT
SIZE, LAYERS, KEPT = 64, 4, 1  # the products of a network, and the one that stays in float32
ON_OPENVINO, ON_ONNX_RUNTIME = "OpenVINO on cpu", "CPUExecutionProvider"
needs_bf16 = pytest.mark.skipif("bf16" not in computed_halves(), reason="the processor has no bf16 arithmetic")


def save_network(path: Path, half: int) -> Path:
    """x [batch, 64] -> y [batch, 64], of the type `half`: products p0 to p3 with tanh t0 to t3 behind; p1 is in float32."""
    random = np.random.default_rng(0)
    dtype = helper.tensor_dtype_to_np_dtype(half)
    nodes: list[NodeProto] = []
    weights = {}
    last = "x"
    for layer in range(LAYERS):
        weight = (random.standard_normal((SIZE, SIZE)) / 8).astype(np.float32)
        weights[f"w{layer}"] = weight if layer == KEPT else weight.astype(dtype)
        if layer == KEPT:
            nodes.append(helper.make_node("Cast", [last], ["wide"], to=FP32))
            nodes.append(helper.make_node("MatMul", ["wide", f"w{layer}"], ["wide_product"], name=f"p{layer}"))
            nodes.append(helper.make_node("Cast", ["wide_product"], [f"h{layer}"], to=half))
        else:
            nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [f"h{layer}"], name=f"p{layer}"))
        last = "y" if layer == LAYERS - 1 else f"t{layer}"
        nodes.append(helper.make_node("Tanh", [f"h{layer}"], [last], name=f"tanh{layer}"))
    shape: list[int | str] = ["batch", SIZE]
    return save_model(path, nodes, [("x", half, shape)], [("y", half, shape)], weights)


def certify(model: Path, **content: Any) -> Path:
    """Put a certificate beside a model, which names it as the converter's files do."""
    (model.parent / "certificate.json").write_text(json.dumps(content))
    with model.open("ab") as file:
        file.write(named_entry(certificate_sha256(content)))
    return model


def load(
    path: Path,
    asked: CpuPrecision = CpuPrecision.AUTO,
    parameters: Mapping[str, str] | None = None,
    *,
    config: ModelConfig | None = None,
    decisions: Decisions | None = None,
    threads: int = 1,
) -> tuple[Backend, ModelConfig]:
    runtimes, config = Runtimes(decisions=decisions), config or ModelConfig(max_batch_size=8)
    for key, value in (parameters or {}).items():
        config.parameters[key].string_value = value
    placement = DevicePlacement(use_gpu=False, threads=threads, cpu_precision=asked)
    return runtimes.load(path, runtimes.describe(path), placement, config), config


def ran(backend: Backend) -> dict[str, str]:
    """The precision in which each product ran, by its name."""
    assert isinstance(backend, OpenVinoBackend)
    found = {}
    for node in backend.compiled.get_runtime_model().get_ordered_ops():
        about = node.get_rt_info()
        for name in about["originalLayersNames"].astype(str).split(","):
            if name.startswith("p") and "/" not in name:
                found[name] = about["runtimePrecision"].astype(str)
    return found


@needs_bf16
@pytest.mark.parametrize("half", [BF16, FP16])
def test_each_node_runs_in_the_type_that_the_converter_gave_it(tmp_path: Path, half: int) -> None:
    path = certify(save_network(tmp_path / "m.onnx", half), precision="bfloat16", passed=True)
    backend, config = load(path, CpuPrecision.BFLOAT16)
    assert backend.provider == ON_OPENVINO
    assert backend.precision == ("bf16" if half == BF16 else "bf16 (the fp16 model)")
    assert ran(backend) == {"p0": "bf16", "p1": "f32", "p2": "bf16", "p3": "bf16"}
    assert "OpenVINO bf16=" in config.parameters["halfserve.nodes"].string_value
    x = np.random.default_rng(1).standard_normal((5, SIZE)).astype(helper.tensor_dtype_to_np_dtype(half))
    in_float32, _ = load(path, CpuPrecision.FLOAT32)
    assert in_float32.provider == ON_ONNX_RUNTIME
    y, expected = backend.run({"x": x})["y"], in_float32.run({"x": x.astype(in_float32.compute_dtype("x"))})["y"]
    assert y.dtype == expected.dtype
    error = np.abs(y.astype(np.float32) - expected.astype(np.float32)).max()
    assert 0 < error < 0.03, "eight bits of precision"


@pytest.mark.parametrize("certificate", [None, {"passed": True}, {"precision": "bfloat16", "passed": False}])
def test_without_a_verdict_a_half_model_is_computed_in_float32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, certificate: dict[str, Any] | None
) -> None:
    monkeypatch.setattr(onnx_models, "fast_halves", lambda: frozenset({"bf16"}))
    path = save_network(tmp_path / "m.onnx", FP16)
    if certificate is not None:
        certify(path, **certificate)
    with caplog.at_level(logging.INFO):
        backend, _ = load(path)
    assert (backend.provider, backend.precision) == (ON_ONNX_RUNTIME, "fp32 (the fp16 model, upcast)")
    assert "but no certificate says that the model is accurate enough in it; to check that, run `halfserve conv" in caplog.text


@pytest.mark.parametrize("halves", [frozenset[str](), frozenset({"fp16"})])
def test_a_processor_without_half_arithmetic_computes_in_float32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, halves: frozenset[str]
) -> None:
    monkeypatch.setattr(onnx_models, "fast_halves", frozenset)
    monkeypatch.setattr(onnx_models, "computed_halves", lambda: halves)
    path = certify(save_network(tmp_path / "m.onnx", BF16), precision="bfloat16", passed=True)
    with caplog.at_level(logging.INFO):
        assert load(path)[0].precision == "fp32 (the bf16 model, upcast)"
    assert caplog.text == ""
    with pytest.raises(
        ModelLoadError, match="to be computed in bfloat16 on the CPU .*, and this processor has no arithmetic in"
    ):
        load(path, CpuPrecision.BFLOAT16)


@pytest.mark.parametrize(("name", "is_installed"), [("openvino", True), ("openvino", False), ("dnnl", True)])
def test_an_accelerator_of_the_cpu_takes_effect_or_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str, is_installed: bool
) -> None:
    if not is_installed:
        monkeypatch.setattr(onnx_models, "find_spec", lambda _: None)
    config = ModelConfig(max_batch_size=8)
    config.optimization.execution_accelerators.cpu_execution_accelerator.add(name=name)
    backend, _ = load(save_network(tmp_path / "m.onnx", BF16), config=config)
    taken = name == "openvino" and is_installed
    assert backend.provider == (ON_OPENVINO if taken else ON_ONNX_RUNTIME)
    assert (f"cpu_execution_accelerator '{name}' has no effect: the " in caplog.text) != taken


def test_without_openvino_a_model_is_computed_in_float32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_models, "find_spec", lambda _: None)
    for halves in ("computed_halves", "fast_halves"):
        monkeypatch.setattr(onnx_models, halves, lambda: frozenset({"bf16"}))
    path = save_network(tmp_path / "m.onnx", BF16)
    with caplog.at_level(logging.INFO):
        assert load(path)[0].provider == ON_ONNX_RUNTIME
        assert caplog.text == "", "nothing is proved that the package could compute"
        certify(path, precision="bfloat16", passed=True)
        assert load(path)[0].provider == ON_ONNX_RUNTIME
    assert f"with the package 'openvino', which is not installed; {install_hint('openvino')}" in caplog.text
    with pytest.raises(ModelLoadError, match=r"the package 'openvino' is not installed; .* make install EXTRAS=openvino"):
        load(path, CpuPrecision.BFLOAT16)


@pytest.mark.parametrize(
    ("asked", "types"),
    [(CpuPrecision.BFLOAT16, "--dtype float16 --precisions bfloat16"), (CpuPrecision.FLOAT16, "--dtype float16")],
)
def test_a_precision_without_a_verdict_is_refused_with_the_command(tmp_path: Path, asked: CpuPrecision, types: str) -> None:
    path = save_mlp(tmp_path / "m.onnx")  # in float16
    with pytest.raises(ModelLoadError, match=f"no verdict says that this .*`halfserve convert FP32_MODEL {path} {types}`"):
        load(path, asked)
    with pytest.raises(ModelLoadError, match="no verdict says that this"):
        load(path, parameters={"halfserve.cpu_precision": asked})


@needs_bf16
def test_a_models_own_precision_counts_more_than_the_servers(tmp_path: Path) -> None:
    path = certify(save_network(tmp_path / "m.onnx", BF16), precision="bfloat16", passed=True)
    assert load(path, parameters={"halfserve.cpu_precision": "float32"})[0].provider == ON_ONNX_RUNTIME
    assert load(path, CpuPrecision.FLOAT32, {"halfserve.cpu_precision": "bfloat16"})[0].provider == ON_OPENVINO
    with pytest.raises(ModelLoadError, match="'halfserve.cpu_precision' is 'fp8', expected one of 'auto', 'float32'"):
        load(path, parameters={"halfserve.cpu_precision": "fp8"})


@needs_bf16
def test_settings_of_onnx_runtime_keep_a_model_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = certify(save_network(tmp_path / "m.onnx", BF16), precision="bfloat16", passed=True)
    assert load(path, CpuPrecision.BFLOAT16, {"intra_op_thread_count": "1"})[0].provider == ON_OPENVINO
    assert load(path, CpuPrecision.BFLOAT16, {"execution_mode": "1"})[0].provider == ON_ONNX_RUNTIME
    assert "is computed in float32 by ONNX Runtime: its configuration has settings of ONNX Runtime" in caplog.text


def save_float64(path: Path) -> Path:
    shape: list[int | str] = ["batch", 4]
    nodes = [helper.make_node("Add", ["x", "c"], ["s"]), helper.make_node("Cast", ["s"], ["y"], to=BF16)]
    return save_model(path, nodes, [("x", TensorProto.DOUBLE, shape)], [("y", BF16, shape)], {"c": np.ones(4)})


def save_open_ended(path: Path) -> Path:
    inputs: list[tuple[str, int, list[int | str]]] = [("x", BF16, [1]), ("sizes", TensorProto.INT64, [2])]
    return save_model(path, [helper.make_node("Expand", ["x", "sizes"], ["y"])], inputs, [("y", BF16, ["n", "m"])])


def save_with_a_gru(path: Path) -> Path:
    shape: list[int | str] = ["batch", 1, 4]
    nodes = [
        helper.make_node("GRU", ["x", "w", "r"], ["all"], hidden_size=2),
        helper.make_node("Squeeze", ["all", "one"], ["y"]),
    ]
    weights = {name: np.ones((1, 6, size), np.float16) for name, size in (("w", 4), ("r", 2))} | {"one": np.array([1])}
    return save_model(path, nodes, [("x", FP16, shape)], [("y", FP16, ["batch", 1, 2])], weights)


def save_with_a_maximum(path: Path, number: int) -> Path:
    """x [batch, 4] -> the maximum of each row, taken as numbers of a type."""
    nodes = [
        helper.make_node("Cast", ["x"], ["taken"], to=number),
        helper.make_node("ReduceMax", ["taken", "last"], ["most"]),
        helper.make_node("Cast", ["most"], ["y"], to=BF16),
    ]
    weights = {"last": np.array([1])}
    return save_model(path, nodes, [("x", BF16, ["batch", 4])], [("y", BF16, ["batch", 1])], weights)


def save_with_a_maximum_of_floats(path: Path) -> Path:
    return save_with_a_maximum(path, FP32)


@needs_bf16
def test_a_maximum_of_integers_is_computed_by_openvino(tmp_path: Path) -> None:
    path = save_with_a_maximum(tmp_path / "m.onnx", TensorProto.INT32)
    backend, _ = load(certify(path, precision="bfloat16", passed=True), CpuPrecision.BFLOAT16)
    assert backend.provider == ON_OPENVINO
    x = np.array([[1, 0, -7, 1], [-3, -2, -5, -9]], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(backend.run({"x": x})["y"].astype(np.float32), [[1], [-2]])


@needs_bf16
@pytest.mark.parametrize(
    ("save", "reason"),
    [
        (save_with_a_maximum_of_floats, "OpenVINO does not compute its operator ReduceMax as ONNX defines it"),
        (save_with_a_gru, "OpenVINO does not compute its operator GRU as ONNX defines it"),
        (save_float64, "OpenVINO does not compute in float64, which it uses"),
        (save_open_ended, "sizes in it depend on values, which OpenVINO does not check"),
    ],
)
def test_models_that_openvino_computes_otherwise_stay_with_onnx_runtime(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, save: Callable[[Path], Path], reason: str
) -> None:
    path = certify(save(tmp_path / "m.onnx"), precision="bfloat16", passed=True)
    assert load(path)[0].provider == ON_ONNX_RUNTIME
    assert f"{path}: is computed in float32 by ONNX Runtime: {reason}" in caplog.text


@needs_bf16
@pytest.mark.parametrize(
    ("result", "asked", "provider", "said"),
    [
        (
            TrialResult(1.0, 2.0, 0.01),
            CpuPrecision.AUTO,
            ON_OPENVINO,
            "is computed in bfloat16 (OpenVINO in bfloat16 1 ms, ONNX",
        ),
        (
            TrialResult(2.0, 1.0, 0.01),
            CpuPrecision.AUTO,
            ON_ONNX_RUNTIME,
            "is computed in float32 by ONNX Runtime: float32 is faster (Op",
        ),
        (TrialResult(2.0, 1.0, 0.01), CpuPrecision.BFLOAT16, ON_OPENVINO, "is computed in bfloat16 (OpenVINO in bfloat16 2 ms"),
        (
            TrialResult(1.0, 2.0, 0.5),
            CpuPrecision.AUTO,
            ON_ONNX_RUNTIME,
            "float32 by ONNX Runtime: OpenVINO's answers are wrong",
        ),
        (TrialResult(1.0, 2.0, 0.5), CpuPrecision.BFLOAT16, ON_ONNX_RUNTIME, "OpenVINO's answers are wrong here (OpenVINO in"),
        (None, CpuPrecision.AUTO, ON_OPENVINO, "is computed in bfloat16; no batch could be made up to measure it"),
    ],
)
def test_a_trial_decides_and_the_log_says_what_was_measured(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    result: TrialResult | None,
    asked: CpuPrecision,
    provider: str,
    said: str,
) -> None:
    monkeypatch.setattr(cpu_trials, "compared", lambda *_: result)
    path = certify(save_network(tmp_path / "m.onnx", BF16), precision="bfloat16", passed=True)
    with caplog.at_level(logging.INFO):
        backend, config = load(path, asked)
    assert backend.provider == provider
    assert said in caplog.text
    measured = config.parameters["halfserve.measured"].string_value
    assert measured in caplog.text
    assert measured.startswith("" if result is None else f"OpenVINO in bfloat16 {result.half_ms:g} ms, ONNX Runtime in float32")
    assert ("for a batch of 8" in measured) == (result is not None)


@needs_bf16
@pytest.mark.parametrize(
    ("in_bf16", "in_fp16", "said"),
    [
        (TrialResult(4.0, 8.0, 0.01), TrialResult(3.0, 8.0, 0.01), ["is computed in float16 (OpenVINO in float16 3 ms"]),
        # What else the machine does slows both runs of a trial.
        (TrialResult(4.0, 8.0, 0.01), TrialResult(3.0, 5.0, 0.01), ["is computed in bfloat16 (OpenVINO in bfloat16 4 ms"]),
        (
            TrialResult(4.0, 8.0, 0.01),
            TrialResult(3.0, 8.0, 0.5),
            ["is computed in bfloat16: OpenVINO's answers are wrong here (OpenVINO in float16", "in bfloat16 (OpenVINO in bf"],
        ),
        (
            TrialResult(9.0, 8.0, 0.01),
            TrialResult(9.5, 8.0, 0.01),
            ["in float32 by ONNX Runtime: float32 is faster (OpenVINO in bf", "float32 is faster (OpenVINO in float16 9.5 ms"],
        ),
    ],
)
def test_of_two_proved_precisions_the_faster_one_is_computed(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    in_bf16: TrialResult,
    in_fp16: TrialResult,
    said: list[str],
) -> None:
    monkeypatch.setattr(onnx_models, "fast_halves", lambda: frozenset({"bf16", "fp16"}))
    monkeypatch.setattr(cpu_trials, "compared", lambda half, *_: in_bf16 if "bf16" in half.precision else in_fp16)
    path = save_network(tmp_path / "m.onnx", FP16)
    certify(path, precision="float16", passed=True, precisions={"bfloat16": {"passed": True}})
    decisions = Decisions(tmp_path / "trials")
    providers = set()
    for _ in range(2):  # the second is remembered
        caplog.clear()
        with caplog.at_level(logging.INFO):
            backend, config = load(path, decisions=decisions)
        assert [text for text in said if text not in caplog.text] == []
        measured = config.parameters["halfserve.measured"].string_value
        assert f"bfloat16 {in_bf16.half_ms:g} ms" in measured
        assert f"float16 {in_fp16.half_ms:g} ms" in measured
        providers.add((backend.provider, backend.precision.startswith("bf16")))
    expected = ON_ONNX_RUNTIME if "float32 is faster" in said[-1] else ON_OPENVINO
    assert providers == {(expected, "in bfloat16 (" in said[-1])}


@needs_bf16
@pytest.mark.parametrize(("allowed", "provider"), [(0.04, ON_OPENVINO), (0.01, ON_ONNX_RUNTIME)])
def test_a_trial_allows_the_error_of_the_verdict_in_its_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: float, provider: str
) -> None:
    monkeypatch.setattr(cpu_trials, "compared", lambda *_: TrialResult(1.0, 2.0, 0.1))
    further = {"bfloat16": {"passed": True, "budget": {"max_scaled_error": allowed}}}
    own = {"precision": "float16", "passed": True, "budget": {"max_scaled_error": 0.01}}
    path = certify(save_network(tmp_path / "m.onnx", FP16), **own, precisions=further)
    assert load(path, CpuPrecision.BFLOAT16)[0].provider == provider


@needs_bf16
def test_a_trial_is_remembered_for_a_file_and_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def compared(*arguments: Any) -> TrialResult:
        tried.append(arguments)
        return TrialResult(1.0, 2.0, 0.01)

    monkeypatch.setattr(cpu_trials, "compared", compared)
    decisions = Decisions(tmp_path / "trials")
    path = certify(save_network(tmp_path / "m.onnx", BF16), precision="bfloat16", passed=True)
    for expected, threads in ((1, 1), (1, 1), (2, 2)):
        assert (load(path, decisions=decisions, threads=threads)[0].provider, len(tried)) == (ON_OPENVINO, expected)
    for file in (tmp_path / "trials" / "cpu_precision").iterdir():
        file.write_text("[]")
    load(path, decisions=decisions)
    assert len(tried) == 3, "what cannot be read costs another trial"


@needs_bf16
def test_a_trial_runs_both_on_a_batch_of_the_model(tmp_path: Path) -> None:
    path = certify(save_network(tmp_path / "m.onnx", BF16), precision="bfloat16", passed=True)
    (half, _), (float32, _) = load(path, CpuPrecision.BFLOAT16), load(path, CpuPrecision.FLOAT32)
    result = compared(half, float32, Runtimes().describe(path), 8)
    assert result is not None
    assert min(result.half_ms, result.float32_ms) > 0
    assert 0 < result.error < 0.03


def record(path: Path, *, off_by: float = 0.0, compress: bool = False) -> dict[str, str]:
    """Write samples.npz beside a network with its answers in float32; returns what a certificate says of it."""
    x = np.random.default_rng(2).standard_normal((3, SIZE)).astype(np.float32)
    backend, _ = load(path, CpuPrecision.FLOAT32)
    y = backend.run({"x": x.astype(backend.compute_dtype("x"))})["y"].astype(np.float32) + np.float32(off_by)
    save = np.savez_compressed if compress else np.savez
    save(path.parent / "samples.npz", **{"input/x": x, "output/y": y})  # type: ignore[arg-type]  # (of numpy's own options)
    return {"samples.npz": hashlib.sha256((path.parent / "samples.npz").read_bytes()).hexdigest()}


@needs_bf16
@pytest.mark.parametrize("asked", [CpuPrecision.AUTO, CpuPrecision.BFLOAT16])
def test_answers_to_recorded_samples_beyond_the_verdict_keep_float32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asked: CpuPrecision
) -> None:
    path = save_network(tmp_path / "m.onnx", BF16)
    certify(path, precision="bfloat16", passed=True, budget={"max_scaled_error": 0.04}, files=record(path, off_by=0.05))
    decisions = Decisions(tmp_path / "trials")
    for _ in range(2):  # the second is remembered
        backend, config = load(path, asked, decisions=decisions)
        assert backend.provider == ON_ONNX_RUNTIME
        assert "the answers to recorded samples differ by 0.0" in config.parameters["halfserve.measured"].string_value
    warned = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
    assert len(warned) == 2
    assert all("computed in float32 by ONNX Runtime: OpenVINO's answers are wrong here (OpenV" in line for line in warned)


@needs_bf16
def test_recorded_samples_within_the_verdict_are_served_in_half(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_network(tmp_path / "m.onnx", BF16)
    certify(path, precision="bfloat16", passed=True, files=record(path))
    with caplog.at_level(logging.INFO):
        assert load(path, CpuPrecision.BFLOAT16)[0].provider == ON_OPENVINO
    assert "the answers to recorded samples differ by 0.00" in caplog.text


@needs_bf16
@pytest.mark.parametrize(
    ("half", "hint", "budget", "computed"),
    [
        (BF16, False, 0.04, "bf16"),
        (BF16, False, 1e-4, "fp32 (the bf16 model, upcast)"),
        (FP32, False, 1e-4, "fp32"),
        (FP32, True, 0.04, "bf16 (the fp32 model)"),
    ],
)
def test_a_model_that_asks_for_openvino_has_its_samples_checked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, half: int, hint: bool, budget: float, computed: str
) -> None:
    path = save_network(tmp_path / "m.onnx", half)
    certify(path, precision="bfloat16", passed=True, budget={"max_scaled_error": budget}, files=record(path))
    asked = CpuPrecision.BFLOAT16 if half == BF16 else CpuPrecision.AUTO
    backend, _ = load(path, asked, config=openvino_config(hint=hint))
    assert (backend.provider, backend.precision) == (ON_OPENVINO, computed)
    is_worse = half == BF16 and budget < 0.04
    assert ("is computed in float32 by OpenVINO: OpenVINO's answers are wrong here" in caplog.text) == is_worse


@needs_bf16
@pytest.mark.parametrize(
    ("half", "hint", "off_by", "ran"), [(FP32, True, 0.0, "bf16"), (FP32, False, 0.05, "fp32"), (BF16, False, 0.05, "fp32")]
)
def test_wrong_answers_of_a_model_that_asks_for_openvino_refuse_it(
    tmp_path: Path, half: int, hint: bool, off_by: float, ran: str
) -> None:
    path = save_network(tmp_path / "m.onnx", half)
    certify(path, precision="bfloat16", passed=True, budget={"max_scaled_error": 1e-4}, files=record(path, off_by=off_by))
    text = f"answers to recorded samples are wrong here: computed in {ran}.* they differ by 0.0"
    with pytest.raises(ModelLoadError, match=text):
        load(path, config=openvino_config(hint=hint))


def openvino_config(*, hint: bool) -> ModelConfig:
    config = ModelConfig(backend="openvino", max_batch_size=8)
    if hint:
        config.parameters["HINT_BF16"].string_value = "YES"
    return config


@needs_bf16
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        ("other", "samples.npz: cannot be used to check what this machine computes: it is not the file that the certificate"),
        ("compressed", "samples.npz: cannot be used to check what this machine computes: its arrays are compressed"),
        ("text", "samples.npz: cannot be used to check what this machine computes: File is not a zip file"),
        ("gone", ""),
    ],
)
def test_recorded_samples_that_cannot_be_used_are_replaced_by_made_up_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str, reason: str
) -> None:
    path = save_network(tmp_path / "m.onnx", BF16)
    files = record(path, off_by=0.5, compress=harm == "compressed")
    samples = path.parent / "samples.npz"
    if harm == "other":
        samples.write_bytes(samples.read_bytes() + b"\0")
    elif harm == "text":
        samples.write_bytes(b"no samples")
        files = {"samples.npz": hashlib.sha256(b"no samples").hexdigest()}
    elif harm == "gone":
        samples.unlink()
    certify(path, precision="bfloat16", passed=True, files=files)
    with caplog.at_level(logging.INFO):
        assert load(path, CpuPrecision.BFLOAT16)[0].provider == ON_OPENVINO
    assert reason in caplog.text
    assert "; they differ by 0.00" in caplog.text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"passed": True}, {"float16"}),
        ({"passed": True, "precision": "bfloat16"}, {"bfloat16"}),
        ({"passed": False, "precisions": {"bfloat16": {"passed": True}, "float16": {"passed": False}}}, {"bfloat16"}),
        ({"passed": True, "precisions": {"bfloat16": {"passed": True}}}, {"float16", "bfloat16"}),
        ({"passed": True, "precisions": {"bfloat16": {"passed": False}}}, {"float16"}),
        ({"passed": True, "precisions": ["bfloat16"]}, {"float16"}),
        ({"passed": 1}, set()),
        ([], set()),
    ],
)
def test_a_certificates_verdicts_are_read_by_precision(tmp_path: Path, content: Any, expected: set[str]) -> None:
    (tmp_path / "certificate.json").write_text(json.dumps(content))
    save_mlp(tmp_path / "model.onnx")
    named = certificate_sha256(content) if isinstance(content, dict) else ""
    assert passed_precisions(tmp_path / "model.onnx", named) == expected
    for other in (None, "", certificate_sha256({"passed": False})):
        assert passed_precisions(tmp_path / "model.onnx", other) == set(), "the model names another certificate, or none"


def test_the_verdicts_inside_a_model_file_are_read(tmp_path: Path) -> None:
    path, content = save_mlp(tmp_path / "model.onnx"), {"precision": "bfloat16", "passed": True}
    named = certificate_sha256(content)
    with path.open("ab") as file:
        file.write(named_entry(named) + certificate_entry(content))
    assert passed_precisions(path, named) == {"bfloat16"}
    assert passed_precisions(path, None) == set()


@needs_bf16
def test_large_fp16_weights_become_bf16_on_their_way(tmp_path: Path) -> None:
    size = 512
    weight = np.random.default_rng(0).standard_normal((size, size)).astype(np.float16)
    shape: list[int | str] = ["batch", size]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    path = save_model(tmp_path / "m.onnx", nodes, [("x", FP16, shape)], [("y", FP16, shape)], {"w": weight})
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    backend, _ = load(certify(path, precision="bfloat16", passed=True), CpuPrecision.BFLOAT16)
    x = np.eye(size, dtype=np.float16)[:3]
    expected = weight[:3].astype(ml_dtypes.bfloat16).astype(np.float16)
    np.testing.assert_array_equal(backend.run({"x": x})["y"], expected)
