from __future__ import annotations

import numpy as np
import pytest
import torch

from export.verification.torch_reference import FAST_PATH_NOTE, fast_path_note, run_torch
from tests.amp_core.several_inputs import Reader, padded

WORDS = np.array([[3, 4, 0, 0], [5, 6, 7, 8]])


@pytest.mark.parametrize(("lengths", "expected"), [((2, 4), (FAST_PATH_NOTE,)), ((4, 4), ())])
def test_torchs_evaluation_mode_is_noted_where_it_answers_otherwise(
    lengths: tuple[int, int], expected: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    model, feeds = padded().eval(), [{"words": WORDS, "lengths": np.array(lengths)}]
    assert fast_path_note(model, feeds, run_torch(model, feeds)) == expected
    assert fast_path_note(model, [], []) == ()


def test_a_model_without_attention_is_not_run_again() -> None:
    model, feeds = Reader().eval(), [{"words": WORDS, "lengths": np.array([2, 4])}]
    answers = run_torch(model, feeds)
    model.forward = None  # type: ignore[method-assign,assignment]  # (not to be called)
    assert fast_path_note(model, feeds, answers) == ()
