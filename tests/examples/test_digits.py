"""The digits example: data, model, training, the demo's errors, and the other frameworks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from halfserve.amp_core.checkpoint import load_checkpoint
from halfserve.amp_core.training.train import train
from halfserve.amp_core.training.training_settings import TrainingSettings
from halfserve.examples.digits import demo
from halfserve.examples.digits.data import data
from halfserve.examples.digits.demo import DemoError
from halfserve.examples.digits.model import model, with_coordinates
from halfserve.examples.digits.report import training_charts, why_no_bf16
from halfserve.examples.integrations import accelerate_loop, lightning_fabric, lightning_trainer
from halfserve.serve.benchmark import BenchmarkArgumentError
from tests.amp_core.integrations.plain import LIGHTNING, silence_loggers

pytestmark = LIGHTNING
silence_loggers()


def settings(out: Path, epochs: int) -> TrainingSettings:
    return TrainingSettings(
        model="halfserve.examples.digits.model:model",
        data="halfserve.examples.digits.data:data",
        out=out,
        epochs=epochs,
        device="cpu",
    )


def test_the_data_is_always_the_same_split_with_every_digit_in_both_parts() -> None:
    train_set, held_out = data()
    assert (len(train_set), len(held_out)) == (1347, 450)
    for part, again in zip((train_set, held_out), data(), strict=True):
        images, digits = part.tensors
        assert all(torch.equal(a, b) for a, b in zip(part.tensors, again.tensors, strict=True))
        assert (images.dtype, images.shape[1:], digits.dtype) == (torch.float32, (1, 8, 8), torch.int64)
        assert (images.min().item(), images.max().item()) == (0.0, 1.0)
        shares = torch.bincount(digits) / len(digits)
        torch.testing.assert_close(shares, torch.full((10,), 0.1), atol=0.005, rtol=0)
    seen = {tuple(image.flatten().tolist()) for image in train_set.tensors[0]}
    assert sum(tuple(image.flatten().tolist()) in seen for image in held_out.tensors[0]) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_coordinates_are_made_in_the_images_dtype(dtype: torch.dtype) -> None:
    planes = with_coordinates(torch.zeros(2, 1, 4, 8, dtype=dtype))
    assert (planes.dtype, planes.shape) == (dtype, (2, 3, 4, 8))
    assert planes[1, 1, :, 5].tolist() == pytest.approx([-1, -1 / 3, 1 / 3, 1], abs=0.01)
    assert planes[0, 2, 3, [0, 7]].tolist() == [-1.0, 1.0]


def test_a_half_model_answers_in_half_what_the_full_one_answers() -> None:
    torch.manual_seed(0)
    network, images = model().eval(), torch.rand(4, 1, 8, 8)
    full = network(images)
    half = network.half()(images.half())
    assert half.dtype is torch.float16
    torch.testing.assert_close(half.float(), full, atol=5e-3, rtol=0)


@pytest.mark.long
def test_trained_in_float16_it_reads_digits_it_has_never_seen(tmp_path: Path) -> None:
    result = train(settings(tmp_path, epochs=12))
    assert result.metrics["accuracy"] >= 0.98
    checkpoint = load_checkpoint(result.checkpoint)
    images, digits = data()[1].tensors
    with torch.no_grad():
        in_float32 = checkpoint.build_model()(images).argmax(1)
    assert (in_float32 == digits).float().mean().item() >= 0.98


@pytest.mark.parametrize("loss", [0.5, None, "inf"])
def test_training_is_drawn_whatever_the_loss_was(loss: object) -> None:
    steps = [{"step": i, "loss": loss if i == 2 else 1.0 / (i + 1), "scale": 65536.0, "skipped": i == 2} for i in range(6)]
    epochs = [{"evaluation_loss": 0.3, "accuracy": 0.9}, {"evaluation_loss": 0.2, "accuracy": 0.95}]
    drawn = training_charts(steps, epochs)
    assert drawn.count("<svg") == 3
    assert "skipped step" in drawn
    curve = re.findall(r'class="curve" d="([^"]*)"', drawn)[0]
    assert (curve.count("M"), curve.count("L")) == ((1, 5) if loss == 0.5 else (2, 3))  # a gap where it was not finite
    assert "nan" not in drawn


def test_the_demo_says_why_it_has_no_bf16() -> None:
    assert "(AMD EPYC) has no bf16 arithmetic" in why_no_bf16("AMD EPYC", {"fp16"}, openvino=True)
    assert "OpenVINO, which computes in it, is not installed" in why_no_bf16("", {"bf16"}, openvino=False)
    assert why_no_bf16("", {"bf16"}, openvino=True) == ""


@pytest.mark.long
def test_a_step_that_fails_ends_the_demo_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where a folder must go")
    command = [sys.executable, "-m", "halfserve", "demo", "--out", str(tmp_path / "runs" / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("halfserve demo: ")
    assert "Traceback" not in done.stderr


def test_a_wrong_option_is_found_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkArgumentError, match="expected numbers above 0 with commas between"):
        demo.demo(out=tmp_path / "demo", concurrency="1,none")
    assert not (tmp_path / "demo").exists()


@pytest.mark.long
def test_a_failing_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "MODEL", "no.such.module:model")
    with pytest.raises(DemoError, match="'halfserve train' failed; its message is above"):
        demo.demo(out=tmp_path / "demo", epochs=1)


@pytest.fixture
def _fresh_process_state() -> Iterator[None]:
    """accelerate settles the precision once per process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.usefixtures("_fresh_process_state")
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(lightning_trainer, marks=pytest.mark.long),
        lightning_fabric,
        pytest.param(accelerate_loop, marks=pytest.mark.long),
    ],
)
def test_it_learns_and_says_so(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = example.main(epochs=2)
    assert outcome.accuracy > 0.8
    assert outcome.scale == 2.0 ** (16 - outcome.skipped)
    assert " ".join(capsys.readouterr().out.split()) == str(outcome)
