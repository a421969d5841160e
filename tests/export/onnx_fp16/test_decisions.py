from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from halfserve.export.export_errors import ExportError
from tests.export.onnx_fp16.models import assert_clean_both_ways, halve, judged, normal, reasons
from tests.export.stored_models import parse


@pytest.mark.parametrize(
    "text",
    [
        """a = Relu (x) b = Neg (x) s = SequenceConstruct (a, b) t = SequenceInsert (s, x) u = SequenceErase (t)
        y = ConcatFromSequence <axis = 0> (u)""",
        "s = SequenceEmpty () t = SequenceInsert (s, x) y = SequenceAt (t, one)",  # without a type, it is one of floats
        """s = SequenceConstruct (x, x) m = SequenceMap (s) <body = b (float[3] e) => (float[3] f) { f = Sigmoid (e) }>
        y = SequenceAt (m, one)""",
        "s = SplitToSequence (x, one) y = SequenceAt (s, one)",
        "o = Optional (x) h = OptionalHasElement (o) f = Cast <to = 1> (h) y = Mul (x, f)",
        "o = Optional <type = float[3]> () h = OptionalHasElement (o) f = Cast <to = 1> (h) y = Mul (x, f)",
    ],
    ids=["construct", "empty", "map", "split", "optional", "absent optional"],
)
def test_a_sequence_or_an_optional_inside_holds_float16(text: str) -> None:
    weights: dict[str, Any] = {"one": np.int64(0 if "Empty" in text else 1)} if "one" in text else {}
    model = parse(f"g (float[3] x) => (float[n] y) {{ {text} }}", **weights)
    assert_clean_both_ways(model, {"x": normal(3)})
    assert halve(model)[1].kept == ()


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
        assert_clean_both_ways(model, {"c": np.array(yes), "x": normal(3)})


def test_a_blocked_reader_keeps_the_whole_sequence_in_float32() -> None:
    model = parse(
        """g (float[3] x) => (float[3] y) {
        r = Relu (x) s = SequenceConstruct (r) t = SequenceInsert (s, r) u = SequenceErase (t) v = SequenceInsert (u, x)
        w = Identity (v) a = SequenceAt (w, i) y = Neg (a) }""",
        i=np.int64(0),
    )
    judged(model, {"x": normal(3)}, keep_fp32_nodes=["a"])
    assert set(reasons(halve(model, keep_fp32_nodes=["a"])[1])) == {"s", "t", "u", "v", "a"}


@pytest.fixture
def model() -> onnx.ModelProto:
    chain = parse("g (float[3] x) => (float[3] y) { a = Relu (x) b = Softmax (a) c = LogSoftmax (b) y = Neg (c) }")
    for node, name in zip(chain.graph.node, ["enc.0/relu", "enc.0/softmax", "enc.1/log", "head"], strict=True):
        node.name = name
    return chain


@pytest.mark.parametrize(
    ("nodes", "kept"),
    [
        (["head"], {"head": "in keep_fp32_nodes"}),
        (["enc.0/*"], dict.fromkeys(["enc.0/relu", "enc.0/softmax"], "matches 'enc.0/*' in keep_fp32_nodes")),
        (["enc.[1-9]/log", "head"], {"enc.1/log": "matches 'enc.[1-9]/log' in keep_fp32_nodes", "head": "in keep_fp32_nodes"}),
    ],
)
def test_nodes_are_blocked_by_name_or_pattern(model: onnx.ModelProto, nodes: list[str], kept: dict[str, str]) -> None:
    assert reasons(halve(model, keep_fp32_nodes=nodes)[1]) == kept


@pytest.mark.parametrize(("operators", "kept"), [(["Softmax"], 1), (["*Softmax"], 2), (["Softmax", "Neg"], 2), (["Conv"], 0)])
def test_operators_are_blocked_by_name_or_pattern(model: onnx.ModelProto, operators: list[str], kept: int) -> None:
    assert len(halve(model, keep_fp32_ops=operators)[1].kept) == kept


@pytest.mark.parametrize(
    ("lists", "text"),
    [
        ({"keep_fp32_nodes": ["enc.0/relo"]}, ("keep_fp32_nodes: the node 'enc.0/relo' matches no node of the model; "
          "did you mean 'enc.0/relu'?")),
        ({"keep_fp32_nodes": ["dec.*"]}, "keep_fp32_nodes: the pattern 'dec.*' matches no node of the model"),
        ({"keep_fp32_ops": ["SoftMax"]}, ("keep_fp32_ops: the operator 'SoftMax' matches no operator of the model; "
          "did you mean 'Softmax'?")),
        ({"keep_fp32_ops": ["?ew*"]}, "keep_fp32_ops: the pattern '?ew*' matches no operator of the model"),
    ],
)  # fmt: skip
def test_what_matches_nothing_is_an_error(model: onnx.ModelProto, lists: dict[str, list[str]], text: str) -> None:
    with pytest.raises(ExportError) as caught:
        halve(model, **lists)  # type: ignore[arg-type]  # (two lists by name)
    assert str(caught.value).startswith(text)


def test_a_single_name_is_a_list_of_one(model: onnx.ModelProto) -> None:
    assert reasons(halve(model, keep_fp32_ops="Neg")[1]) == {"head": "Neg is in keep_fp32_ops"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("r = RandomNormalLike <seed = 3.0> (x) y = Add (x, r)", ("RandomNormalLike 'r' (seed 3)",)),
        ("r = RandomUniformLike (x) y = Add (x, r)", ("RandomUniformLike 'r'",)),
        ("r = RandomNormal <shape = [2, 3]> () s = RandomUniform <shape = [2, 3]> () y = Add (r, s)",
         ("RandomNormal 'r'", "RandomUniform 's'")),
        ("p = Sigmoid (x) r = Bernoulli (p) y = Mul (x, r)", ("Bernoulli 'r'",)),
        ("m = Multinomial <sample_size = 3, dtype = 6> (x) f = Cast <to = 1> (m) y = Add (x, f)", ("Multinomial 'm'",)),
        ("t = Constant <value = bool {1}> () r = Constant <value_float = 0.5> () y = Dropout (x, r, t)", ("Dropout 'y'",)),
        ("t = Constant <value = bool {0}> () r = Constant <value_float = 0.5> () y = Dropout (x, r, t)", ()),
        ("y = Dropout (x)", ()),
    ],
)  # fmt: skip
def test_what_draws_random_numbers_is_in_the_report(text: str, found: tuple[str, ...]) -> None:
    converted, report = halve(parse(f"g (float[2,3] x) => (float[2,3] y) {{ {text} }}"))
    assert report.random_nodes == tuple(report.to_json()["random_nodes"]) == found
    again = halve(converted)[1]
    assert (again.converted_before, again.random_nodes) == (True, found)


def test_a_kept_node_says_where_it_comes_from(model: onnx.ModelProto) -> None:
    node = model.graph.node[3]
    node.metadata_props.add(key="halfserve.module", value="head.norm")
    node.metadata_props.add(key="halfserve.source", value="net/head.py:42")
    (kept,) = halve(model, keep_fp32_nodes=["head"])[1].kept
    assert (kept.op_type, kept.module, kept.source) == ("Neg", "head.norm", "net/head.py:42")
    assert halve(model, keep_fp32_nodes=["head"])[1].to_json()["fp32_modules"] == ["head.norm"]


def test_a_repairs_mark_is_honoured_and_taken_away(model: onnx.ModelProto) -> None:
    model.graph.node[1].metadata_props.add(key="halfserve.keep", value="its square overflows")
    converted, report = halve(model)
    assert reasons(report) == {"enc.0/softmax": "its square overflows"}
    assert all(entry.key != "halfserve.keep" for node in converted.graph.node for entry in node.metadata_props)


def test_everything_may_be_kept(model: onnx.ModelProto) -> None:
    converted, report = halve(model, keep_fp32_nodes=["*"])
    assert (report.fp16_nodes, report.casts_added, report.share) == (0, 0, 0.0)
    assert [node.op_type for node in converted.graph.node] == ["Relu", "Softmax", "LogSoftmax", "Neg"]
