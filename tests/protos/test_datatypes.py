from __future__ import annotations

import numpy as np
import onnx
import pytest
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from protos.datatypes import BY_CONFIG, BY_ONNX, BY_WIRE, DATATYPES, Datatype
from protos.model_config_pb2 import DataType


@pytest.mark.parametrize("row", DATATYPES, ids=lambda row: row.wire)
def test_a_row_agrees_with_onnx_and_with_tritonclient(row: Datatype) -> None:
    assert BY_WIRE[row.wire] is BY_CONFIG[row.config] is BY_ONNX[row.onnx] is row
    if row.numpy is None:
        assert (row.wire, row.itemsize, row.onnx) == ("BF16", 2, onnx.TensorProto.BFLOAT16)
        return
    assert onnx.helper.tensor_dtype_to_np_dtype(row.onnx) == row.numpy
    assert np.dtype(triton_to_np_dtype(row.wire)) == row.numpy
    assert np_to_triton_dtype(bool if row.wire == "BOOL" else row.numpy.type) == row.wire  # it fails on numpy.bool
    assert row.itemsize == (None if row.wire == "BYTES" else row.numpy.itemsize)


def test_every_data_type_of_the_config_has_a_row() -> None:
    assert {row.config for row in DATATYPES} == set(DataType.values()) - {0}
    assert BY_WIRE["BYTES"].config_name == "TYPE_STRING"
    assert BY_WIRE["FP16"].config_name == "TYPE_FP16"


def test_only_the_16_bit_floats_have_no_typed_contents() -> None:
    assert {row.wire for row in DATATYPES if row.contents is None} == {"FP16", "BF16"}
