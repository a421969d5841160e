"""Each framework's example learns the digits in float16, and says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from accelerate.state import AcceleratorState, GradientState

from examples.integrations import accelerate_loop, lightning_fabric, lightning_trainer
from tests.amp_core.integrations.quiet import LIGHTNING, silence_loggers

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = LIGHTNING
silence_loggers()


@pytest.fixture(autouse=True)
def _fresh_process_state() -> Iterator[None]:
    """accelerate settles the precision once per process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("example", [lightning_trainer, lightning_fabric, accelerate_loop])
def test_it_learns_and_says_so(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = example.main(epochs=2)
    assert outcome.accuracy > 0.8
    assert outcome.scale == 2.0 ** (16 - outcome.skipped)
    assert " ".join(capsys.readouterr().out.split()) == str(outcome)
