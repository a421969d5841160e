"""The digits example keeps its promise: it learns in float16, the same way each time, and runs and exports in every dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from amp_core.checkpoint import load_checkpoint
from amp_core.training.settings import TrainingSettings
from amp_core.training.train import train
from examples.digits.data import data
from examples.digits.model import DigitsNet, model, with_coordinates

if TYPE_CHECKING:
    from pathlib import Path


def settings(out: Path, epochs: int) -> TrainingSettings:
    return TrainingSettings(
        model="examples.digits.model:model", data="examples.digits.data:data", out=out, epochs=epochs, device="cpu"
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


def test_it_is_exported_with_a_dynamic_batch() -> None:
    batch = torch.export.Dim("batch")
    network = DigitsNet().half().eval()
    program = torch.export.export(network, (torch.rand(2, 1, 8, 8).half(),), dynamic_shapes=({0: batch},))
    images = torch.rand(7, 1, 8, 8).half()
    torch.testing.assert_close(program.module()(images), network(images))


def test_the_same_few_epochs_twice_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    results = [load_checkpoint(train(settings(tmp_path / name, epochs=1)).checkpoint) for name in ("a", "b")]
    for name, value in results[0].weights.items():
        assert torch.equal(value, results[1].weights[name]), name
    assert results[0].metrics == results[1].metrics


def test_trained_in_float16_it_reads_digits_it_has_never_seen(tmp_path: Path) -> None:
    result = train(settings(tmp_path, epochs=12))
    assert result.metrics["accuracy"] >= 0.98
    checkpoint = load_checkpoint(result.checkpoint)
    images, digits = data()[1].tensors
    with torch.no_grad():
        in_float32 = checkpoint.build_model()(images).argmax(1)
    assert (in_float32 == digits).float().mean().item() >= 0.98
