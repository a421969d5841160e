"""Every kind of invalid ModelInferRequest."""

from __future__ import annotations

import random
from collections.abc import Callable

from benchmarks.malforming import mangled, wrong_fields
from benchmarks.malforming.case import Case, infer_case

MAKERS: dict[str, Callable[[random.Random], bytes]] = {
    make.__name__.replace("_", " "): make
    for make in (
        mangled.changed_bytes,
        mangled.cut_off,
        mangled.spliced,
        mangled.random_bytes,
        mangled.huge_lengths,
        wrong_fields.wrong_model,
        wrong_fields.wrong_datatype,
        wrong_fields.wrong_shape,
        wrong_fields.wrong_byte_count,
        wrong_fields.wrong_tensors,
        wrong_fields.wrong_parameters,
        wrong_fields.wrong_contents,
    )
}


def message_case(kind: str, chance: random.Random) -> Case:
    """Make a case of one kind of `MAKERS`."""
    return infer_case(kind, MAKERS[kind](chance))
