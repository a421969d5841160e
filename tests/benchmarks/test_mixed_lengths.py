"""The program that compares padded with unpadded serving, on little."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import typer

from benchmarks.mixed_lengths import compared, lengths_of
from tests.serve.padded_models import save_masked_mean


def test_mixes_are_within_their_bounds_and_repeat() -> None:
    short, tail = (lengths_of(mix, np.random.default_rng(0)) for mix in ("short", "tail"))
    assert set(short) == set(range(5, 21))
    assert (min(tail), max(tail) > 150, max(tail) <= 200) == (5, True, True)
    assert sorted(tail)[len(tail) // 2] < 20, "most are short"
    assert lengths_of("tail", np.random.default_rng(0)) == tail
    with pytest.raises(typer.BadParameter, match="'long' is no mix"):
        lengths_of("long", np.random.default_rng(0))


@pytest.mark.long
def test_both_ways_are_measured(tmp_path: Path) -> None:
    model = save_masked_mean(tmp_path / "models" / "mean")
    (found,) = compared(model, ["short"], [4], rounds=1, seconds=0.5, device="cpu")
    assert (found.mix, found.in_flight) == ("short", 4)
    assert all(rate > 0 for rates in found.rates.values() for rate in rates)


def test_a_model_without_padding_is_refused(tmp_path: Path) -> None:
    save_masked_mean(tmp_path / "models" / "mean", parameters={})
    with pytest.raises(typer.BadParameter, match="has no parameter 'halfserve.padding'; export it again, or add it"):
        next(compared(tmp_path / "models" / "mean", ["7"], [4], rounds=1, seconds=0.5, device="cpu"))
    with pytest.raises(typer.BadParameter, match="has no config.pbtxt; expected a model's folder of a repository"):
        next(compared(tmp_path / "models", ["7"], [4], rounds=1, seconds=0.5, device="cpu"))
