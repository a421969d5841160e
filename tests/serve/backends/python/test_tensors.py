from __future__ import annotations

import socket
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

from halfserve.serve.backends.python_child.log_and_metrics import Logger
from halfserve.serve.backends.python_child.triton_errors import TritonModelException
from halfserve.serve.backends.python_child.triton_tensors import Tensor
from halfserve.serve.backends.python_child.wire import Channel, ChannelClosedError, WireTensor


def test_dlpack_carries_numbers_both_ways_without_a_copy() -> None:
    x = np.array([1, 2.5, -3], np.float32)
    seen = from_dlpack(Tensor("x", x))
    seen[0] = 7
    assert x[0] == 7
    capsule = seen.__dlpack__()
    again = Tensor.from_dlpack("y", capsule)
    assert (again.name(), again.triton_dtype(), again.shape()) == ("y", 11, [3])
    np.testing.assert_array_equal(again.as_numpy(), x)
    np.testing.assert_array_equal(from_dlpack(again.to_dlpack()).numpy(), x)


def test_bfloat16_goes_by_dlpack_alone() -> None:
    x = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    tensor = Tensor.from_dlpack("x", x)
    assert (tensor.triton_dtype(), tensor.to_wire().datatype) == (14, "BF16")
    assert torch.equal(from_dlpack(tensor), x)
    assert torch.equal(from_dlpack(Tensor.from_dlpack("x", x.__dlpack__())), x), "from a capsule, as Triton's models hand over"
    assert torch.equal(from_dlpack(Tensor("x", np.array([1.5, -2.0], ml_dtypes.bfloat16))), x)
    with pytest.raises(TritonModelException, match="'x' is BF16, which numpy does not have; use torch.from_dlpack"):
        tensor.as_numpy()


@pytest.mark.parametrize("wrong", ["text", 3, None])
def test_what_has_no_dlpack_is_refused(wrong: object) -> None:
    with pytest.raises(TritonModelException, match="expected an object with __dlpack__, or a DLPack capsule"):
        Tensor.from_dlpack("x", wrong)


@pytest.mark.parametrize(
    ("called", "arguments", "expected"),
    [
        (Tensor, (None, np.ones(1)), "a name and an array, got None and ndarray"),
        (Tensor, ("x", None), "a name and an array, got 'x' and NoneType"),
        (Logger.log_info, (None,), "a text and a level"),
        (Logger.log, ("text", 1), "a text and a level"),
    ],
)
def test_arguments_of_a_wrong_kind_raise_type_error_as_in_triton(
    called: Callable[..., object], arguments: tuple[object, ...], expected: str
) -> None:
    with pytest.raises(TypeError, match=expected):
        called(*arguments)


def test_texts_and_bytes_are_bytes_elements() -> None:
    for array in (np.array(["\u00e9", "b"], object), np.array(["\u00e9", "b"]), np.array([b"\xc3\xa9", b"b"])):
        sent = Tensor("x", array).to_wire()
        assert Tensor.from_wire(sent).as_numpy().tolist() == [b"\xc3\xa9", b"b"]


def test_segments_are_used_again_once_their_views_are_gone() -> None:
    ours, theirs = map(Channel, socket.socketpair())
    big = np.arange(100_000, dtype=np.float32)
    places, kept = [], []
    for _ in range(3):
        ours.send({"k": "x"}, [WireTensor("x", "FP32", big.shape, big)])
        header, tensors = theirs.receive()
        assert header == {"k": "x"}
        np.testing.assert_array_equal(tensors[0].data, big)
        places.append(tensors[0].data.ctypes.data)
        kept += tensors[:] if len(places) == 1 else []  # the first one's views live on
        del tensors
        theirs.send({})
        ours.receive()
    assert places[0] != places[1] == places[2]
    np.testing.assert_array_equal(kept[0].data, big)
    ours.shut_down()
    with pytest.raises(ChannelClosedError):
        theirs.receive()
    del kept
    ours.close()
    theirs.close()
