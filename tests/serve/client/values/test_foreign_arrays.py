"""Tensors of other libraries."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from protos.datatypes import BY_WIRE
from serve.client.errors import InvalidRequest
from serve.client.values.foreign_arrays import as_numpy
from serve.client.values.tensors import as_input


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64, torch.bool])
def test_tensors_share_their_memory(dtype: torch.dtype) -> None:
    tensor = torch.zeros((2, 3), dtype=dtype)
    array = as_numpy(tensor)
    tensor[1, 2] = 1
    assert array[1, 2] == 1
    assert array.shape == (2, 3)


def test_bfloat16_tensors_keep_their_bits() -> None:
    tensor = torch.tensor([[1.0, -2.5], [3e38, float("inf")]], dtype=torch.bfloat16).T
    array = as_numpy(tensor)
    assert array.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(array.astype(np.float32), tensor.float().numpy())
    np.testing.assert_array_equal(as_input(tensor, BY_WIRE["BF16"], "x").view(ml_dtypes.bfloat16), array)


def test_tensors_that_numpy_refuses() -> None:
    weights = torch.ones(2, requires_grad=True)
    np.testing.assert_array_equal(as_numpy(weights), [1, 1])
    np.testing.assert_array_equal(as_numpy(torch.tensor([1j]).conj().imag), [-1])
    with pytest.raises(InvalidRequest, match="input 'x' cannot be read as an array: "):
        as_input(torch.ones(2).to_sparse(), BY_WIRE["FP32"], "input 'x'")


def test_a_library_that_speaks_dlpack_only() -> None:
    class Foreign:
        def __init__(self, array: Any) -> None:
            self._array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self._array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self._array.__dlpack_device__()

    array = np.arange(3, dtype=np.float16)
    assert np.shares_memory(as_numpy(Foreign(array)), array)


def test_the_client_does_not_import_torch() -> None:
    program = "import sys, serve.client.cli; assert not {'torch', 'onnxruntime', 'onnx'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
