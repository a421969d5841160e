"""What does not fit together shows the first time; later errors are bugs, and keep their traceback."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from amp_core.calling import described_call
from amp_core.data import DataError
from amp_core.training.distributed import is_broken_connection
from amp_core.training.errors import TrainingError, one_line, place_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


@contextmanager
def misfits(told: str, *, is_first: bool, model: nn.Module | None = None, inputs: Any = None) -> Iterator[None]:
    """Tell in one line what the user's model, data and functions raise the first time that they meet.

    Args:
        told: The line's beginning: what does not fit together, and where that shows.
        is_first: Whether it is the first time; else nothing is done.
        model: Whose `forward` to describe in the line, if it may be what does not fit.
        inputs: That it was given.

    Raises:
        TrainingError: In place of what the block raises.
    """
    try:
        yield
    except Exception as error:
        if not is_first or isinstance(error, (TrainingError, DataError)) or is_broken_connection(error):
            raise
        call = "" if model is None else described_call(model, inputs)
        raise TrainingError(f"{told} raised {one_line(error)}{place_of(error)}{call}") from error
