"""`--dynamic INPUT.AXIS=NAME`: sizes of a model's inputs, beside the batch's, that may differ from request to request."""

from __future__ import annotations

import re
from collections.abc import Sequence

from export.errors import UsageError
from export.to_onnx.dimensions import BATCH, base_name

FORM = re.compile(r"(?P<input>.+)\.(?P<axis>\d+)=(?P<name>(?:[1-9]\d*\*)?\w+)")


def dynamic_sizes(options: Sequence[str]) -> dict[str, dict[int, str]]:
    """The options' names of dimensions, by input and axis.

    Raises:
        UsageError: One cannot be read, is about the batch, or two are about the same axis.
    """
    sizes: dict[str, dict[int, str]] = {}
    for option in options:
        found = FORM.fullmatch(option)
        if found is None or not base_name(found["name"]).isidentifier():
            raise UsageError(f"--dynamic {option!r}: expected INPUT.AXIS=NAME, such as tokens.1=length")
        if base_name(found["name"]) == BATCH:
            raise UsageError(f"--dynamic {option!r}: {BATCH!r} is what axis 0 is called; give the size a name of its own")
        axes, axis = sizes.setdefault(found["input"], {}), int(found["axis"])
        if axis == 0:
            raise UsageError(f"--dynamic {option!r}: axis 0 is the batch, which may have any size as it is; expected 1 or more")
        if axis in axes:
            raise UsageError(f"--dynamic names axis {axis} of input {found['input']!r} twice; expected each once")
        axes[axis] = found["name"]
    return sizes
