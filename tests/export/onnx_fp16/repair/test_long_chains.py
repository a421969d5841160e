"""Chains of thousands of nodes: no repair walks them by recursion, or from every node to the end."""

from __future__ import annotations

import numpy as np
import onnx_ir
import pytest

from export.onnx_fp16.convert import convert
from tests.export.onnx_fp16.models import parse

LENGTH = 1500


@pytest.mark.parametrize("op", ["Mul", "Add", "Identity", "Exp", "Sqrt"])
def test_a_long_chain_is_converted(op: str) -> None:
    second = ", c" if op in ("Mul", "Add") else ""
    steps = " ".join(f"a{i + 1} = {op} (a{i}{second})" for i in range(LENGTH))
    text = f"g (float[N, 8] x) => (float[N, 8] y) {{ a0 = Relu (x) {steps} y = Softmax (a{LENGTH}) }}"
    done = convert(onnx_ir.from_proto(parse(text, c=np.array(0.5))))
    assert done.report.fp16_nodes == done.report.float_nodes


def test_a_long_chain_behind_a_mask_is_converted() -> None:
    steps = " ".join(f"a{i + 1} = Add (a{i}, c)" for i in range(LENGTH))
    text = f"g (float[N, 8] x) => (float[N, 8] y) {{ a0 = Add (x, lowest) {steps} y = Softmax (a{LENGTH}) }}"
    assert convert(onnx_ir.from_proto(parse(text, c=np.array(0.5), lowest=np.array(-1e9)))).report.float_nodes > LENGTH
