from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.export.onnx_fp16.models import FLOAT, FLOAT16, clean_both_ways, judged, normal, parse


def bodies(model: onnx.ModelProto) -> list[onnx.GraphProto]:
    return [attribute.g for node in model.graph.node for attribute in node.attribute if attribute.HasField("g")]


@pytest.mark.parametrize("yes", [True, False])
def test_branches_agree_on_a_type(yes: bool) -> None:
    model = parse(
        """g (bool c, float[3] x, int64[3] i) => (float[3] y) {
        b = If (c) <then_branch = t () => (float[3] p) { q = Relu (x) p = Mul (q, w) },
                    else_branch = e () => (float[3] r) { r = Cast <to = 1> (i) }>
        y = Neg (b) }""",
        w=normal(3),
    )
    feeds = {"c": np.array(yes), "x": normal(3), "i": np.array([1, 2, 3])}
    converted = clean_both_ways(model, feeds)
    assert {body.output[0].type.tensor_type.elem_type for body in bodies(converted)} == {FLOAT16}


def test_a_branch_that_gives_what_is_outside() -> None:
    model = parse(
        """g (bool c, float[3] x) => (float[3] y) {
        s = Sigmoid (x)
        y = If (c) <then_branch = t () => (float[3] p) { p = Identity (x) },
            else_branch = e () => (float[3] r) { r = Identity (s) }>
        }"""
    )
    clean_both_ways(model, {"c": np.array(True), "x": normal(3)})


def test_a_branch_in_float32_inside_a_model_in_float16() -> None:
    model = parse(
        """g (bool c, float[3] x) => (float[3] y) {
        b = If (c) <then_branch = t () => (float[3] p) { q = Exp (x) p = Log (q) },
            else_branch = e () => (float[3] r) { r = Neg (x) }>
        y = Neg (b) }"""
    )
    for body in bodies(model):
        for node in body.node:
            node.name = node.output[0]
    converted = judged(model, {"c": np.array(True), "x": normal(3)}, node_block_list=["[qp]"])
    then = bodies(converted)[0]
    assert [node.op_type for node in then.node] == ["Exp", "Log", "Cast"]
    assert then.output[0].name == "p"


def test_a_loop_carries_float16_and_gathers_it() -> None:
    model = parse(
        """g (int64 n, float[3] x) => (float[3] y, float[K, 3] all) {
        y, all = Loop (n, , x) <body = b (int64 i, bool c, float[3] v) => (bool d, float[3] w, float[3] s) {
            d = Identity (c) f = Cast <to = 1> (i) u = Add (v, k) w = Mul (u, half) s = Add (w, f) }> }""",
        k=normal(3),
        half=0.5,
    )
    converted = clean_both_ways(model, {"n": np.array(4), "x": normal(3)})
    (body,) = bodies(converted)
    assert body.input[2].type.tensor_type.elem_type == FLOAT16


def test_a_blocked_loop_stays_float32_with_all_that_is_in_it() -> None:
    model = parse(
        """g (int64 n, float[3] x) => (float[3] y) {
        r = Relu (x)
        l = Loop (n, , r) <body = b (int64 i, bool c, float[3] v) => (bool d, float[3] w) {
            d = Identity (c) u = Exp (v) w = Log (u) }>
        y = Neg (l) }"""
    )
    converted = judged(model, {"n": np.array(2), "x": normal(3)}, node_block_list=["l"])
    (body,) = bodies(converted)
    assert body.input[2].type.tensor_type.elem_type == FLOAT
    assert "Cast" not in [node.op_type for node in body.node]


def test_a_body_reads_a_weight_that_others_want_in_float32() -> None:
    model = parse(
        """g (bool c, float[3] x) => (float[3] y) {
        o = Exp (w)
        b = If (c) <then_branch = t () => (float[3] p) { p = Mul (x, w) },
            else_branch = e () => (float[3] r) { r = Mul (x, o) }>
        y = Neg (b) }""",
        w=normal(3),
    )
    converted = judged(model, {"c": np.array(True), "x": normal(3)}, op_block_list=["Exp"])
    kinds = {tensor.name: tensor.data_type for tensor in converted.graph.initializer}
    assert kinds == {"w": FLOAT, "w_float16": FLOAT16}


def test_a_scan_over_float16() -> None:
    model = parse(
        """g (float[3] start, float[4, 3] xs) => (float[3] y, float[4, 3] ys) {
        y, ys = Scan <num_scan_inputs = 1, body = b (float[3] s, float[3] x) => (float[3] t, float[3] o) {
            t = Add (s, x) o = Mul (t, k) }> (start, xs) }""",
        k=0.5,
    )
    clean_both_ways(model, {"start": normal(3), "xs": normal(4, 3)})


def test_nested_bodies_reach_out_two_levels() -> None:
    model = parse(
        """g (int64 n, bool c, float[3] x) => (float[3] y) {
        r = Relu (x)
        y = Loop (n, , r) <body = b (int64 i, bool k, float[3] v) => (bool d, float[3] w) {
            d = Identity (k)
            w = If (c) <then_branch = t () => (float[3] p) { p = Add (v, r) },
                else_branch = e () => (float[3] q) { q = Sub (v, r) }> }> }"""
    )
    clean_both_ways(model, {"n": np.array(3), "c": np.array(True), "x": normal(3)})


def test_a_constant_that_starts_a_loop_out_of_range_keeps_its_variable_in_float32() -> None:
    model = parse(
        """g (int64 n, float[3] x) => (float[3] y) {
        y = Loop (n, , low) <body = b (int64 i, bool c, float[3] v) => (bool d, float[3] w) {
            d = Identity (c) w = Max (v, x) }> }""",
        low=np.full(3, -1e9, np.float32),
    )
    converted = judged(model, {"n": np.array(1), "x": normal(3)})
    assert bodies(converted)[0].input[2].type.tensor_type.elem_type == FLOAT
