from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from halfserve.protos.certificates import certificate_sha256, named_entry
from halfserve.serve.backends.openvino.fitness import computed_halves
from halfserve.serve.backends.runtimes import Runtimes
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.precision_guard.tally import GuardCounters
from tests.models import save_mlp, save_table, save_text
from tests.serve.engine.precision_guard.guarded_models import TWIN, config_text, load, write_table


def counters(repository: Path) -> GuardCounters:
    (model,) = load(repository)
    assert model.guard is not None
    return model.guard.counters()


def test_a_plain_model_file_is_counted_and_has_no_threshold(tmp_path: Path) -> None:
    loaded = counters(save_mlp(tmp_path / "mlp.onnx"))
    assert (loaded.policy, loaded.drift_threshold, list(loaded.outputs)) == ("count", None, ["y"])


@pytest.mark.parametrize(
    ("twin", "text"),
    [
        (None, r"there is no .*1/fp32/model\.onnx; export again with --fp32-twin, or set"),
        (lambda path: path.write_bytes(b"no model"), "fp32/model.onnx"),
        (save_mlp, "is no fp32 twin of the model: its input 'i' is absent, the model's is INT64"),
    ],
    ids=["none", "broken", "another model"],
)
def test_fallback_needs_a_twin(tmp_path: Path, twin: Callable[[Path], object] | None, text: str) -> None:
    folder = write_table(tmp_path / "m", twin=twin is not None, precision_guard="fallback")
    if twin is not None:
        twin(folder / TWIN)
    with pytest.raises(ModelLoadError, match=text):
        load(tmp_path)


def test_for_shadow_runs_alone_the_twin_is_not_loaded_at_the_start(tmp_path: Path) -> None:
    (write_table(tmp_path / "m") / TWIN).write_bytes(b"no model")
    assert counters(tmp_path).drift_threshold == 0.01


def test_a_twin_that_changed_before_its_load_is_refused(tmp_path: Path) -> None:
    folder = write_table(tmp_path / "m", shadow_rate="1")
    (model,) = load(tmp_path)
    assert model.guard is not None
    twin = folder / TWIN
    twin.write_bytes(twin.read_bytes() + b"\0")
    assert model.guard._shadow is not None
    with pytest.raises(ModelLoadError, match="fp32/model.onnx: has been changed since the model was loaded"):
        model.guard._shadow._twin.prepare()


@pytest.mark.parametrize(
    ("parameters", "certificate", "threshold"),
    [
        ({}, {"budget": {"max_scaled_error": 0.05}}, 0.05),
        ({}, {"budget": {"max_scaled_error": "none"}}, 0.01),
        ({}, {"budget": {}}, 0.01),
        ({}, [], 0.01),
        ({"drift_threshold": "0.2"}, {"budget": {"max_scaled_error": 0.05}}, 0.2),
        ({"shadow_rate": "0"}, {"budget": {"max_scaled_error": 0.05}}, None),
    ],
    ids=["the certificate's budget", "not a number", "absent", "no certificate", "the configuration's", "no shadow runs"],
)
def test_the_threshold_is_the_configurations_or_the_certificates(
    tmp_path: Path, parameters: dict[str, str], certificate: object, threshold: float | None
) -> None:
    folder = write_table(tmp_path / "m")
    (folder / "config.pbtxt").write_text(config_text(**parameters))
    (folder / "1" / "certificate.json").write_text(json.dumps(certificate))
    assert counters(tmp_path).drift_threshold == threshold


@pytest.mark.parametrize("path", ["../2/model.onnx", "/etc/passwd", "fp32/../../x"])
def test_a_twin_outside_the_versions_folder_is_refused(tmp_path: Path, path: str) -> None:
    write_table(tmp_path / "m", fp32_twin=path)
    with pytest.raises(ModelLoadError, match=r"'halfserve\.fp32_twin' is '.*', expected a path in the version's folder"):
        load(tmp_path)


def test_a_link_out_of_the_versions_folder_is_refused(tmp_path: Path) -> None:
    folder = write_table(tmp_path / "m", twin=False)
    outside = save_table(tmp_path / "elsewhere" / "model.onnx", np.float32)
    (folder / "1" / "fp32").symlink_to(outside.parent)
    with pytest.raises(ModelLoadError, match="expected a path in the version's folder"):
        load(tmp_path)


def test_a_twin_may_have_another_name(tmp_path: Path) -> None:
    folder = write_table(tmp_path / "m", twin=False, precision_guard="fallback", fp32_twin="twin.onnx")
    save_table(folder / "1" / "twin.onnx", np.float32)
    assert counters(tmp_path).policy == "fallback"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("precision_guard", "on", "is 'on', expected one of 'off', 'count', 'reject', 'fallback'"),
        ("shadow_rate", "2", "is '2', expected a number of 0 or more and at most 1"),
        ("shadow_share", "0", "is '0', expected a number above 0 and at most 1"),
        ("drift_threshold", "0", "is '0', expected a number above 0"),
        ("max_compute_s", "-1", "is '-1', expected a number above 0"),
        ("degraded_not_ready", "maybe", "is 'maybe', expected 'on' or 'off'"),
    ],
)
def test_values_that_make_no_sense_are_refused(tmp_path: Path, name: str, value: str, expected: str) -> None:
    folder = write_table(tmp_path / "m")
    (folder / "config.pbtxt").write_text(config_text(**{name: value}))
    with pytest.raises(ModelLoadError, match=f"parameter 'halfserve.{name}' {expected}"):
        load(tmp_path)


def test_clients_are_told_the_models_precision_and_not_its_twins(tmp_path: Path) -> None:
    write_table(tmp_path / "m", precision_guard="fallback")
    (model,) = load(tmp_path)
    assert model.config.parameters["halfserve.precision"].string_value == "fp32 (the fp16 model, upcast)"


@pytest.mark.parametrize(
    ("twin", "parameters", "expected"),
    [
        (
            False,
            {"shadow_rate": "1", "degraded_not_ready": "on"},
            "there is no fp32 twin, 'fp32/model.onnx' in the version's folder",
        ),
        (True, {"fp32_twin": "fp23/model.onnx"}, "there is no fp32 twin, 'fp23/model.onnx' in the version's folder"),
        (True, {"shadow_rate": "0", "shadow_share": "0.5", "drift_threshold": "1"}, "halfserve.shadow_rate is 0"),
        (True, {"precision_guard": "off", "fp32_twin": "../x", "shadow_rate": "1"}, "halfserve.precision_guard is 'off'"),
        (True, {"shadow_rate": "1", "shadow_share": "1", "drift_threshold": "1", "degraded_not_ready": "on"}, None),
        (False, {"precision_guard": "reject"}, None),
    ],
    ids=["no twin", "a misspelt twin", "no comparison", "off", "compared", "no need"],
)
def test_parameters_that_have_no_effect_are_named(
    tmp_path: Path, twin: bool, parameters: dict[str, str], expected: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    write_table(tmp_path / "m", twin=twin, **parameters)
    load(tmp_path)
    idle = sorted(set(parameters) - {"precision_guard"} - ({"shadow_rate"} if parameters.get("shadow_rate") == "0" else set()))
    named = ", ".join(f"parameters.halfserve.{name}" for name in idle)
    said = [] if expected is None else [f"{tmp_path / 'm' / 'config.pbtxt'}: no effect here, as {expected}: {named}"]
    assert caplog.messages == said


def save_product(path: Path, dtype: str) -> None:
    """x [batch, 4] -> y [batch, 4], both of this type: the product with a diagonal matrix of 1000."""
    text = f"({dtype}[batch, 4] x) => ({dtype}[batch, 4] y) {{ y = MatMul(x, w) }}"
    save_text(path, text, w=1000 * np.eye(4, dtype=np.float32 if dtype == "float" else np.float16))


@pytest.mark.skipif("bf16" not in computed_halves(), reason="the processor has no bf16 arithmetic")
@pytest.mark.parametrize("way", ["hint", "verdict"])
def test_the_twin_of_a_model_in_bf16_is_computed_in_float32(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "m"
    save_product(folder / "1" / "model.onnx", "float" if way == "hint" else "float16")
    save_product(folder / TWIN, "float")
    if way == "hint":
        asked = 'backend: "openvino" parameters { key: "HINT_BF16" value { string_value: "YES" } }'
        (folder / "config.pbtxt").write_text(f"{config_text(shadow_rate='1')} {asked}")
    else:
        verdict = {"precision": "bfloat16", "passed": True}
        (folder / "1" / "certificate.json").write_text(json.dumps(verdict))
        with (folder / "1" / "model.onnx").open("ab") as file:
            file.write(named_entry(certificate_sha256(verdict)))
        (folder / "config.pbtxt").write_text(config_text(shadow_rate="1", cpu_precision="bfloat16"))
    (model,) = load(tmp_path, Runtimes())
    assert model.config.parameters["halfserve.precision"].string_value.startswith("bf16")
    assert model.guard is not None
    assert model.guard._shadow is not None
    x = np.array([[0.1, 0.2, 0.3, 7]], np.float32)
    np.testing.assert_allclose(model.guard._shadow._twin.answer({"x": x})["y"], 1000 * x, rtol=1e-6)
