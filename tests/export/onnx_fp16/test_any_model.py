from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.onnx_fp16.conversion_mark import CONVERTED
from halfserve.export.onnx_fp16.convert import convert, convert_float_to_float16
from tests.export.conversions.crash_pool import Crash, CrashPool
from tests.export.conversions.judge import Case, Verdict, cases, judge, judgeable
from tests.export.onnx_fp16.models import judged, normal, run
from tests.export.stored_models import parse

# Random graphs: whatever they are, the conversion is clean, the same each time, and done once.

UNARY = ("Relu", "Sigmoid", "Tanh", "Identity", "Abs", "Neg", "Softplus")
BINARY = ("Add", "Sub", "Mul", "Max", "Min")


@dataclass
class Grower:
    """Writes a graph, statement by statement; all values have shape (3, 4)."""

    draw: st.DrawFn
    lines: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=lambda: ["x", "z", "w"])
    count: int = 0

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def any_value(self, outer: list[str]) -> str:
        return self.draw(st.sampled_from([*self.values, *outer]))

    def grow(self, outer: list[str], depth: int) -> str:
        """Add a statement and return the value it makes."""
        kinds = ["unary", "binary", "matmul", "cast", "constant", "shape", "bool", *(["if", "loop"] if depth else [])]
        kind, made = self.draw(st.sampled_from(kinds)), self.fresh()
        a, b = self.any_value(outer), self.any_value(outer)
        if kind == "unary":
            self.lines.append(f"{made} = {self.draw(st.sampled_from(UNARY))} ({a})")
        elif kind == "binary":
            self.lines.append(f"{made} = {self.draw(st.sampled_from(BINARY))} ({a}, {b})")
        elif kind == "matmul":
            self.lines.append(f"{made}_m = MatMul ({a}, square) {made} = Tanh ({made}_m)")
        elif kind == "cast":
            to = self.draw(st.sampled_from([1, 10, 11]))
            self.lines.append(f"{made}_c = Cast <to = {to}> ({a}) {made} = Cast <to = 1> ({made}_c)")
        elif kind == "constant":
            self.lines.append(f"{made}_k = Constant <value = float {{0.5}}> () {made} = Mul ({a}, {made}_k)")
        elif kind == "shape":
            self.lines.append(f"{made}_s = Shape ({b}) {made} = Reshape ({a}, {made}_s)")
        elif kind == "bool":
            self.lines.append(f"{made}_b = Less ({a}, {b}) {made} = Where ({made}_b, {b}, {a})")
        elif kind == "if":
            then, other = self.body(outer, depth - 1, ""), self.body(outer, depth - 1, "")
            self.lines.append(f"{made} = If (yes) <then_branch = {then}, else_branch = {other}>")
        else:
            self.lines.append(f"{made} = Loop (two, yes, {a}) <body = {self.body(outer, depth - 1, 'loop')}>")
        self.values.append(made)
        return made

    def body(self, outer: list[str], depth: int, kind: str) -> str:
        inner = Grower(draw=self.draw, values=[], count=self.count * 100 + 1000 * len(self.lines) + 7)
        name, carried, go = inner.fresh(), inner.fresh(), inner.fresh()
        captured = [*outer, *self.values]
        if kind == "loop":
            inner.values.append(carried)
        last = [inner.grow(captured, depth) for _ in range(self.draw(st.integers(1, 3)))][-1]
        self.count = inner.count + 50
        end = f"{name}_out = Tanh ({last})"
        lines = " ".join([*inner.lines, end])
        if kind == "loop":
            head = f"{name} (int64 {name}_i, bool {go}, float[3, 4] {carried}) => (bool {go}_on, float[3, 4] {name}_out)"
            return f"{head} {{ {go}_on = Identity ({go}) {lines} }}"
        return f"{name} () => (float[3, 4] {name}_out) {{ {lines} }}"


@st.composite
def graphs(draw: st.DrawFn) -> onnx.ModelProto:
    grower = Grower(draw=draw)
    for _ in range(draw(st.integers(1, 6))):
        last = grower.grow([], depth=1)
    extra = draw(st.sampled_from(grower.values))
    text = " ".join([*grower.lines, f"y = Tanh ({last})", f"u = Sigmoid ({extra})"])
    return parse(
        f"g (float[3, 4] x, float[3, 4] z, bool yes) => (float[3, 4] y, float[3, 4] u) {{ {text} }}",
        w=normal(3, 4),
        square=normal(4, 4, scale=0.5),
        two=np.int64(2),
    )


def runs_in_float32(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> bool:
    """Whether ONNX Runtime runs the original: 1.31 loses some values that bodies read (so random ones are not nested)."""
    try:
        run(model, **feeds)
    except Exception as error:  # noqa: BLE001  (the runtime's own exceptions)
        assert "Missing Input" in str(error)  # noqa: PT017  (any other complaint means that the test's graphs are wrong)
        return False
    return True


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(graphs(), st.booleans(), st.booleans())
def test_any_graph_converts_cleanly_and_once(model: onnx.ModelProto, keep: bool, yes: bool) -> None:
    before = model.SerializeToString(deterministic=True)
    rng = np.random.default_rng(1)
    feeds = {"x": rng.random((3, 4), np.float32), "z": rng.random((3, 4), np.float32), "yes": np.array(yes)}
    assume(runs_in_float32(model, feeds))
    judged(model, feeds, keep=keep)
    first = convert_float_to_float16(model, keep_io_types=keep).SerializeToString(deterministic=True)
    assert model.SerializeToString(deterministic=True) == before
    assert convert_float_to_float16(model, keep_io_types=keep).SerializeToString(deterministic=True) == first
    assert convert_float_to_float16(first, keep_io_types=keep).SerializeToString(deterministic=True) == first


@settings(max_examples=25, deadline=None)
@given(graphs())
def test_without_its_mark_a_converted_model_converts_to_itself(model: onnx.ModelProto) -> None:
    first = convert_float_to_float16(model, repair=False)
    bare = onnx.ModelProto()
    bare.CopyFrom(first)
    kept = [entry for entry in bare.metadata_props if not entry.key.startswith(CONVERTED)]
    del bare.metadata_props[:]
    bare.metadata_props.extend(kept)
    second = convert_float_to_float16(bare, repair=False)
    assert second.SerializeToString(deterministic=True) == first.SerializeToString(deterministic=True)


# ONNX's own backend tests, converted: a sample here, all of them in `benchmarks/convert.py`.

SHORT = {"simple", "light"}
SHARES = {"node": 16, "simple": 1, "pytorch-operator": 2, "pytorch-converted": 4, "light": 1}  # one in this number
QUICK_LIGHT = {"light_shufflenet", "light_squeezenet"}  # the others take ONNX Runtime seconds to run


def convert_and_judge(case: Case, keep_io: bool) -> tuple[Verdict | None, int, int]:
    """The verdict, None where the case does not count; float nodes; those in float16, without what repairs keep."""
    if not judgeable(case):
        return None, 0, 0
    content = convert_float_to_float16(case.model, keep_io_types=keep_io).SerializeToString(deterministic=True)
    plain = convert(
        onnx_ir.from_proto(onnx.load_from_string(case.model)), ConversionSettings(keep_io_types=keep_io, repair=False)
    ).report
    return judge(case, content, keep_io), plain.float_nodes, plain.fp16_nodes


def sample(kind: str) -> Iterator[Case]:
    for case in cases(kind):
        number = int.from_bytes(hashlib.sha256(case.name.encode()).digest()[:4], "big")
        if number % SHARES[kind] == 0 and (kind != "light" or case.name in QUICK_LIGHT):
            yield case


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind in SHORT else pytest.mark.long) for kind in SHARES])
def test_onnx_backend_test_models_convert_cleanly(kind: str) -> None:
    chosen = [(case, keep) for case in sample(kind) for keep in (True, False)]
    with CrashPool(convert_and_judge, workers=1) as pool:
        outcomes = list(zip(chosen, pool.map(chosen), strict=True))
    counting = [(c.name, keep, o) for (c, keep), o in outcomes if isinstance(o, Crash) or o[0] is not None]
    wrong = [(name, keep, o) for name, keep, o in counting if isinstance(o, Crash) or o[0] != Verdict(ok=True)]
    assert len(counting) >= 4
    assert wrong == []
    counts = [o[1:] for _, _, o in counting if not isinstance(o, Crash)]
    assert sum(half for _, half in counts) >= 0.95 * sum(floats for floats, _ in counts)
