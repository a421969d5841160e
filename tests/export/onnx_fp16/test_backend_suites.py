"""ONNX's own backend tests, converted: a sample here, all of them in `benchmarks/convert.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import onnx
import onnx_ir
import pytest

from benchmarks.converters.crash_pool import Crash, CrashPool
from benchmarks.converters.judge import Case, Verdict, cases, judge, judgeable
from export.onnx_fp16.convert import convert
from export.onnx_fp16.convert_float_to_float16 import convert_float_to_float16

SHARES = {"node": 16, "simple": 1, "pytorch-operator": 2, "pytorch-converted": 4, "light": 1}  # one in so many
QUICK_LIGHT = {"light_shufflenet", "light_squeezenet"}  # the others take ONNX Runtime seconds to run


def convert_and_judge(case: Case, keep_io: bool) -> tuple[Verdict | None, int, int]:
    """The verdict, None where the case does not count; float nodes; those in float16, without what repairs keep."""
    if not judgeable(case):
        return None, 0, 0
    content = convert_float_to_float16(case.model, keep_io_types=keep_io).SerializeToString(deterministic=True)
    plain = convert(onnx_ir.from_proto(onnx.load_from_string(case.model)), keep_io_types=keep_io, repair=False).report
    return judge(case, content, keep_io), plain.float_nodes, plain.fp16_nodes


def sample(kind: str) -> Iterator[Case]:
    for case in cases(kind):
        number = int.from_bytes(hashlib.sha256(case.name.encode()).digest()[:4], "big")
        if number % SHARES[kind] == 0 and (kind != "light" or case.name in QUICK_LIGHT):
            yield case


@pytest.mark.parametrize("kind", SHARES)
def test_models_nobody_here_wrote_are_clean(kind: str) -> None:
    chosen = [(case, keep) for case in sample(kind) for keep in (True, False)]
    with CrashPool(convert_and_judge, workers=1) as pool:
        outcomes = list(zip(chosen, pool.map(chosen), strict=True))
    counting = [(c.name, keep, o) for (c, keep), o in outcomes if isinstance(o, Crash) or o[0] is not None]
    wrong = [(name, keep, o) for name, keep, o in counting if isinstance(o, Crash) or o[0] != Verdict(ok=True)]
    assert len(counting) >= 4
    assert wrong == []
    counts = [o[1:] for _, _, o in counting if not isinstance(o, Crash)]
    assert sum(half for _, half in counts) >= 0.95 * sum(floats for floats, _ in counts)
