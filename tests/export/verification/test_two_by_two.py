from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from export.certificate.certificate import BudgetExceeded
from export.files.model_file import serialize
from export.onnx_fp16.convert_float_to_float16 import convert_float_to_float16
from export.verification.metrics import Array
from export.verification.simulate import round_every_node
from export.verification.verify import verify
from tests.export.sessions import open_session, run_session

LARGE = np.linspace(4e4, 6e4, 32, dtype=np.float32).reshape(4, 8)


def model(
    operator: str, shapes: Sequence[Sequence[int | str]], kind: int = TensorProto.FLOAT16, **attributes: str
) -> onnx.ModelProto:
    names = [f"x{index}" for index in range(len(shapes))]
    node = helper.make_node(operator, names, ["y"], name="node", **attributes)
    inputs = [helper.make_tensor_value_info(name, kind, shape) for name, shape in zip(names, shapes, strict=True)]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", kind, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(rounded: onnx.ModelProto, *arrays: Array) -> Array:
    feeds = {f"x{index}": array for index, array in enumerate(arrays)}
    (y,) = run_session(open_session(serialize(rounded), "ORT_ENABLE_BASIC"), feeds).values()
    return y


def equations(onnx_model: onnx.ModelProto) -> list[str]:
    nodes = [node for node in onnx_model.graph.node if node.op_type == "Einsum"]
    return [attribute.s.decode() for node in nodes for attribute in node.attribute]


def test_a_sum_overflows_on_its_way() -> None:
    large, small = np.full((2, 3), 6e4, np.float16), np.full(3, 100, np.float16)
    rounded = round_every_node(model("Sum", [[2, 3], [2, 3], [2, 3], [3]]))
    assert np.isposinf(run(rounded, large, large, -large, small)).all()
    assert (run(rounded, large, -large, large, small) == np.float16(60100)).all()
    assert [node.name for node in rounded.graph.node if node.op_type == "Add"][-1] == "node"


@pytest.mark.parametrize(
    ("equation", "parts"),
    [
        ("ij,jk,kl->il", ["ij,jk->ik", "ik,kl->il"]),
        ("ij, jk, kl", ["ij,jk->ik", "ik,kl->il"]),
        ("ij,kl->k", ["ij->", "kl->k", ",k->k"]),
        ("ij,ij,ij->i", ["ij,ij->ij", "ij,ij->i"]),
        ("ii,i,i->i", ["ii,i->i", "i,i->i"]),
        ("i,j,k->kji", ["i,j->ij", "ij,k->kji"]),
        ("ij,jk->ik", ["ij,jk->ik"]),
        ("ij->i", ["ij->i"]),
        ("...i,...i,...i->...", ["...i,...i,...i->..."]),
    ],
)
def test_an_einsum_is_taken_pair_by_pair(equation: str, parts: list[str]) -> None:
    ranks = [len(term) for term in equation.partition("->")[0].replace(" ", "").replace("...", "n").split(",")]
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal([3] * rank).astype(np.float16) for rank in ranks]
    rounded = round_every_node(model("Einsum", [[3] * rank for rank in ranks], equation=equation))
    assert equations(rounded) == parts
    assert np.allclose(run(rounded, *arrays), np.einsum(equation, *map(np.float32, arrays)), atol=2e-2)


def test_a_product_of_three_overflows_on_its_way() -> None:
    x, small = np.full(3, 600, np.float16), np.full(3, 1e-3, np.float16)
    assert np.isposinf(run(round_every_node(model("Einsum", [[3]] * 3, equation="i,i,i->i")), x, x, small)).all()


def test_what_sums_in_float32_stays_one_node() -> None:
    assert [node.op_type for node in round_every_node(model("Sum", [[2]] * 3, TensorProto.FLOAT)).graph.node] == ["Sum"]


def test_a_sum_that_overflows_on_its_way_gets_no_certificate() -> None:
    reference = model("Sum", [["N", 8]] * 3, TensorProto.FLOAT)
    with pytest.raises(BudgetExceeded, match="NaN or infinite"):
        verify(reference, convert_float_to_float16(reference), [LARGE, LARGE, -LARGE], adversarial=False, cuda=False)
