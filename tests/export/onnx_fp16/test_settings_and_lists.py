from __future__ import annotations

import onnx
import pytest

from export.errors import ExportError
from tests.export.onnx_fp16.models import halve, parse, reasons


@pytest.fixture
def model() -> onnx.ModelProto:
    chain = parse("g (float[3] x) => (float[3] y) { a = Relu (x) b = Softmax (a) c = LogSoftmax (b) y = Neg (c) }")
    for node, name in zip(chain.graph.node, ["enc.0/relu", "enc.0/softmax", "enc.1/log", "head"], strict=True):
        node.name = name
    return chain


@pytest.mark.parametrize(
    ("nodes", "kept"),
    [
        (["head"], {"head": "in node_block_list"}),
        (["enc.0/*"], dict.fromkeys(["enc.0/relu", "enc.0/softmax"], "matches 'enc.0/*' in node_block_list")),
        (["enc.[1-9]/log", "head"], {"enc.1/log": "matches 'enc.[1-9]/log' in node_block_list", "head": "in node_block_list"}),
    ],
)
def test_nodes_are_blocked_by_name_or_pattern(model: onnx.ModelProto, nodes: list[str], kept: dict[str, str]) -> None:
    assert reasons(halve(model, node_block_list=nodes)[1]) == kept


@pytest.mark.parametrize(("operators", "kept"), [(["Softmax"], 1), (["*Softmax"], 2), (["Softmax", "Neg"], 2), (["Conv"], 0)])
def test_operators_are_blocked_by_name_or_pattern(model: onnx.ModelProto, operators: list[str], kept: int) -> None:
    assert len(halve(model, op_block_list=operators)[1].kept) == kept


@pytest.mark.parametrize(
    ("lists", "text"),
    [
        ({"node_block_list": ["enc.0/relo"]}, ("node_block_list: the node 'enc.0/relo' matches no node of the model; "
          "did you mean 'enc.0/relu'?")),
        ({"node_block_list": ["dec.*"]}, "node_block_list: the pattern 'dec.*' matches no node of the model"),
        ({"op_block_list": ["SoftMax"]}, ("op_block_list: the operator 'SoftMax' matches no operator of the model; "
          "did you mean 'Softmax'?")),
        ({"op_block_list": ["?ew*"]}, "op_block_list: the pattern '?ew*' matches no operator of the model"),
    ],
)  # fmt: skip
def test_what_matches_nothing_is_an_error(model: onnx.ModelProto, lists: dict[str, list[str]], text: str) -> None:
    with pytest.raises(ExportError) as caught:
        halve(model, **lists)  # type: ignore[arg-type]  # (two lists by name)
    assert str(caught.value).startswith(text)


def test_a_single_name_is_a_list_of_one(model: onnx.ModelProto) -> None:
    assert reasons(halve(model, op_block_list="Neg")[1]) == {"head": "Neg is in op_block_list"}


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
    (kept,) = halve(model, node_block_list=["head"])[1].kept
    assert (kept.op_type, kept.module, kept.source) == ("Neg", "head.norm", "net/head.py:42")
    assert halve(model, node_block_list=["head"])[1].to_json()["fp32_modules"] == ["head.norm"]


def test_a_repairs_mark_is_honoured_and_taken_away(model: onnx.ModelProto) -> None:
    model.graph.node[1].metadata_props.add(key="halfserve.keep", value="its square overflows")
    converted, report = halve(model)
    assert reasons(report) == {"enc.0/softmax": "its square overflows"}
    assert all(entry.key != "halfserve.keep" for node in converted.graph.node for entry in node.metadata_props)


def test_everything_may_be_blocked(model: onnx.ModelProto) -> None:
    converted, report = halve(model, node_block_list=["*"])
    assert (report.fp16_nodes, report.casts_added, report.share) == (0, 0, 0.0)
    assert [node.op_type for node in converted.graph.node] == ["Relu", "Softmax", "LogSoftmax", "Neg"]
