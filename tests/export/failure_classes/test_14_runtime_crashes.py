"""Class 14: float16 models that end the process in which ONNX Runtime opens them."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest

from benchmarks.converters.crash_pool import Crash, CrashPool
from benchmarks.converters.judge import Case, Verdict, judge
from tests.export.failure_classes.converters import naive, named, normal, ours, parse


def swapped_batch() -> onnx.ModelProto:
    """What torch's MultiheadAttention begins with: (batch, time, width) to (time, batch, width), then a product.

    With dynamic sizes and the weight in float16, ONNX Runtime 1.31.1 fuses the two and dereferences nothing.
    """
    return named(
        parse(
            """g (float[N, T, 4] x) => (float[T, N, 5] y) {
            t = Transpose <perm = [1, 0, 2]> (x)
            y = MatMul (t, w) }""",
            w=normal(4, 5),
        )
    )


@pytest.fixture(scope="module")
def judged() -> Callable[[onnx.ModelProto], Verdict | Crash]:
    """The judge in a child process, which a crash ends."""

    def verdict(converted: onnx.ModelProto) -> Verdict | Crash:
        case = Case(
            kind="own", name="swapped_batch", model=swapped_batch().SerializeToString(), inputs=({"x": normal(2, 3, 4)},)
        )
        with CrashPool(judge, workers=1) as pool:
            return next(pool.map([(case, converted.SerializeToString(), True)]))

    return verdict


@pytest.mark.parametrize(
    ("convert", "expected"),
    [pytest.param(naive, Crash("killed by SIGSEGV"), id="naive-fails"), pytest.param(ours, Verdict(ok=True), id="ours-passes")],
)
def test_a_product_behind_a_swap_of_dynamic_axes(
    convert: Callable[[onnx.ModelProto], onnx.ModelProto],
    expected: Crash | Verdict,
    judged: Callable[[onnx.ModelProto], Verdict | Crash],
) -> None:
    assert judged(convert(swapped_batch())) == expected
