from __future__ import annotations

import numpy as np
import pytest

from tests.export.onnx_fp16.models import FLOAT16, clean_both_ways, halve, judged, normal, parse, reasons


def test_a_sequence_inside_holds_float16() -> None:
    model = parse(
        """g (float[3] x) => (float[6] y) {
        a = Relu (x) b = Neg (x) s = SequenceConstruct (a, b) t = SequenceInsert (s, x) u = SequenceErase (t)
        y = ConcatFromSequence <axis = 0> (u) }"""
    )
    clean_both_ways(model, {"x": normal(3)})
    assert halve(model)[1].kept == ()


def test_an_empty_sequence_without_a_type_is_one_of_floats() -> None:
    model = parse(
        "g (float[3] x) => (float[3] y) { s = SequenceEmpty () t = SequenceInsert (s, x) y = SequenceAt (t, i) }", i=np.int64(0)
    )
    converted = clean_both_ways(model, {"x": normal(3)})
    (empty,) = [node for node in converted.graph.node if node.op_type == "SequenceEmpty"]
    assert empty.attribute[0].i == FLOAT16


def test_a_sequence_of_the_interface_keeps_its_type_and_all_that_it_flows_into() -> None:
    model = parse(
        """g (seq(float[3]) s, float[3] x) => (float[3] y, float[3] z) {
        t = SequenceInsert (s, x) a = SequenceAt (t, i) y = Neg (a) z = Neg (x) }""",
        i=np.int64(0),
    )
    feeds = {"s": [normal(3)], "x": normal(3)}
    judged(model, feeds, keep=True)
    judged(model, feeds, keep=False)
    assert set(reasons(halve(model)[1])) == {"t", "a"}
    assert "cannot be cast" in reasons(halve(model)[1])["t"]
    assert halve(model, keep_io_types=False)[1].kept == ()


def test_sequences_through_a_branch_agree() -> None:
    model = parse(
        """g (bool c, float[3] x) => (float[3] y) {
        s = SequenceConstruct (x)
        t = If (c) <then_branch = t () => (seq(float[3]) p) { p = SequenceInsert (s, x) },
                    else_branch = e () => (seq(float[3]) q) { q = Identity (s) }>
        y = SequenceAt (t, i) }""",
        i=np.int64(0),
    )
    for yes in (True, False):
        clean_both_ways(model, {"c": np.array(yes), "x": normal(3)})


def test_a_blocked_reader_keeps_the_whole_sequence_in_float32() -> None:
    model = parse(
        """g (float[3] x) => (float[3] y) {
        r = Relu (x) s = SequenceConstruct (r) t = SequenceInsert (s, r) u = SequenceErase (t) v = SequenceInsert (u, x)
        w = Identity (v) a = SequenceAt (w, i) y = Neg (a) }""",
        i=np.int64(0),
    )
    judged(model, {"x": normal(3)}, node_block_list=["a"])
    assert set(reasons(halve(model, node_block_list=["a"])[1])) == {"s", "t", "u", "v", "a"}


def test_a_map_over_a_sequence() -> None:
    model = parse(
        """g (float[3] x) => (float[3] y) {
        s = SequenceConstruct (x, x)
        m = SequenceMap (s) <body = b (float[3] e) => (float[3] f) { f = Sigmoid (e) }>
        y = SequenceAt (m, i) }""",
        i=np.int64(1),
    )
    clean_both_ways(model, {"x": normal(3)})


@pytest.mark.parametrize("there", [True, False])
def test_an_optional_inside(there: bool) -> None:
    made = "o = Optional (x)" if there else "o = Optional <type = float[3]> ()"
    model = parse(f"g (float[3] x) => (bool h, float[3] y) {{ {made} h = OptionalHasElement (o) y = Neg (x) }}")
    clean_both_ways(model, {"x": normal(3)})


def test_splitting_makes_a_sequence_of_float16() -> None:
    model = parse(
        "g (float[4] x) => (float[2] y) { s = SplitToSequence (x, two) y = SequenceAt (s, i) }", two=np.int64(2), i=np.int64(1)
    )
    clean_both_ways(model, {"x": normal(4)})
