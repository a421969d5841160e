"""Operators that have no CUDA kernel become others that have one, with the same results."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx_ir
import pytest

from halfserve.export.half_types import TargetDevice
from halfserve.export.onnx_fp16.convert import convert_float_to_float16
from halfserve.export.onnx_fp16.repair import run_passes
from halfserve.export.onnx_fp16.repair.cuda_forms import SPELL_OUT_CLIP, SPELL_OUT_MAX_POOL
from halfserve.export.onnx_fp16.repair.edits import RepairPass
from halfserve.export.placement.cuda_kernels import predict_cuda
from tests.export.onnx_fp16.models import normal, ops, run
from tests.export.stored_models import parse


def pool(attributes: str, *, opset: int = 22, outputs: str = "y") -> onnx.ModelProto:
    text = f"g (float[n,2,h,w] x) => (float[n,2,a,b] y) {{ {outputs} = MaxPool <{attributes}> (x) }}"
    return parse(text, opset=opset, ir=10)


def clip(*bounds: str, opset: int = 22) -> onnx.ModelProto:
    text = f"g (float[n,4] x) => (float[n,4] y) {{ y = Clip ({', '.join(('x', *bounds))}) }}"
    return parse(text, opset=opset, ir=8, lo=np.array(-0.5), hi=np.array(0.25))


def spelled_out(model: onnx.ModelProto, repair: RepairPass = SPELL_OUT_MAX_POOL) -> onnx.ModelProto:
    work = onnx_ir.from_proto(model)
    run_passes(work, [repair])
    made = onnx_ir.to_proto(work)
    onnx.checker.check_model(made, full_check=True)
    return made


@pytest.mark.parametrize("size", [9, 10, 11])
@pytest.mark.parametrize(("kernel", "stride"), [(1, 2), (2, 1), (2, 2), (3, 2), (3, 3), (5, 1)])
def test_a_pool_of_slices_gives_the_same_numbers(kernel: int, stride: int, size: int) -> None:
    x, seen = normal(2, 2, size, 7) - 5, 0  # below 0, so that zeros for padding would show
    for before, behind, dilation, rounds_up in itertools.product(range(3), range(3), (1, 2), (0, 1)):
        if max(before, behind) >= kernel:
            continue
        model = pool(
            f"kernel_shape = [{kernel}, 2], strides = [{stride}, 2], pads = [{before}, 0, {behind}, 0], "
            f"dilations = [{dilation}, 1], ceil_mode = {rounds_up}"
        )
        made = spelled_out(model)
        if "MaxPool" not in ops(made):
            seen += 1
            np.testing.assert_array_equal(run(made, x=x)[0], run(model, x=x)[0])
    assert seen >= 2


def test_equal_bounds_of_slices_are_one_constant() -> None:
    made = spelled_out(pool("kernel_shape = [3, 3], pads = [1, 1, 1, 1]"))
    assert len(made.graph.initializer) == 7, "0, 1, 2, 3, -1, -2, and the end"
    assert ops(made) == [*["Slice", "Slice", "Concat", "Slice", "Slice", "Slice", "Max"] * 2]


@pytest.mark.parametrize(
    "attributes",
    [
        "kernel_shape = [2, 2], auto_pad = 'SAME_UPPER'",
        "kernel_shape = [2, 2], dilations = [2, 2], pads = [1, 1, 1, 1]",
        "kernel_shape = [2, 2], strides = [3, 3], ceil_mode = 1",
    ],
)
def test_a_pool_whose_padding_no_element_replaces_stays(attributes: str) -> None:
    assert ops(spelled_out(pool(attributes.replace("'", '"')))) == ["MaxPool"]


def test_a_pool_that_says_where_its_numbers_were_stays() -> None:
    assert ops(spelled_out(pool("kernel_shape = [2, 2]", outputs="y, i"))) == ["MaxPool"]


def test_a_pool_with_a_kernel_stays() -> None:
    assert ops(spelled_out(pool("kernel_shape = [2, 2]", opset=21))) == ["MaxPool"]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [(("lo", "hi"), ["Max", "Min"]), (("", "hi"), ["Min"]), (("lo",), ["Max"]), ((), ["Identity"])],
)
def test_a_clip_of_max_and_min_gives_the_same_numbers(bounds: tuple[str, ...], expected: list[str]) -> None:
    model, x = clip(*bounds), normal(5, 4)
    made = spelled_out(model, SPELL_OUT_CLIP)
    assert ops(made) == expected
    np.testing.assert_array_equal(run(made, x=x)[0], run(model, x=x)[0])


NET = """g (float[n,3,9,9] x) => (float[n,4,5,5] y) {
    a = Conv (x, w) b = Clip (a, lo, hi) y = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (b) }"""


@pytest.mark.parametrize(
    ("target", "pools", "clips", "kinds"),
    [("cuda", 0, 0, []), ("any", 0, 1, []), ("cpu", 1, 1, ["refused", "refused"])],
)
def test_what_a_network_in_bfloat16_becomes_for_each_target(
    target: TargetDevice, pools: int, clips: int, kinds: list[str]
) -> None:
    model = parse(NET, opset=17, ir=8, w=normal(4, 3, 1, 1), lo=np.array(0.0), hi=np.array(6.0))
    made = convert_float_to_float16(model, dtype="bfloat16", upgrade_opset=True, target_device=target)
    assert made.opset_import[0].version == 22
    assert (ops(made).count("MaxPool"), ops(made).count("Clip")) == (pools, clips)
    assert [warning.kind for warning in predict_cuda(made)] == kinds


def test_without_repairs_the_opset_is_not_raised_for_a_pool() -> None:
    model = parse(NET, opset=17, ir=8, w=normal(4, 3, 1, 1), lo=np.array(0.0), hi=np.array(6.0))
    made = convert_float_to_float16(model, dtype="bfloat16", upgrade_opset=True, repair=False)
    assert made.opset_import[0].version == 17


def test_a_pool_of_a_later_opset_becomes_slices_in_float16_too() -> None:
    made = convert_float_to_float16(pool("kernel_shape = [2, 2]"))
    assert predict_cuda(made) == ()
    assert {"Slice", "Max"} <= set(ops(made))
