"""Every kind of tensor gives its numbers, or none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_core.recorder import tensor_parts
from amp_core.recorder.tensor_parts import absolute_parts


def parts(tensor: torch.Tensor) -> list[float]:
    return sorted(value for part in absolute_parts(tensor) for value in part.flatten().tolist())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex32, torch.complex64],
)
def test_every_dtype_gives_magnitudes(dtype: torch.dtype) -> None:
    tensor = torch.tensor([-2.0, 0.5]).to(dtype)
    assert parts(tensor) == ([0.0, 0.0, 0.5, 2.0] if dtype.is_complex else [0.5, 2.0])
    assert {part.dtype for part in absolute_parts(tensor)} == {torch.float64 if dtype == torch.float64 else torch.float32}


def test_a_conjugate_view() -> None:
    assert parts(torch.tensor([3 - 4j]).conj()) == [3.0, 4.0]


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC) tensor support:UserWarning")
def test_sparse_layouts_give_what_they_store() -> None:
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, -3.0]), (4,), check_invariants=True)
    assert parts(twice) == [2.0, 3.0]  # a gradient that is not coalesced: its parts are what was computed
    assert parts(torch.tensor([[0.0, -5.0]]).to_sparse_csc()) == [5.0]


def test_where_no_numbers_are_nothing_is_given() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    for tensor in (torch.ones(3, device="meta"), fake, nested, torch.ones(0), torch.ones(2, 0, 3)):
        assert parts(tensor) == []


def test_the_tensor_itself_stays_as_it_is() -> None:
    tensor = torch.tensor([-1.0, 2.0], dtype=torch.float16)
    assert parts(tensor) == [1.0, 2.0]
    assert tensor.tolist() == [-1.0, 2.0]


@given(shape=st.lists(st.integers(1, 7), min_size=1, max_size=4), piece=st.integers(1, 9), data=st.data())
def test_large_tensors_come_in_pieces(shape: list[int], piece: int, data: st.DataObject) -> None:
    tensor = torch.randn(shape).permute(data.draw(st.permutations(range(len(shape)))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parts, "PIECE", piece)
        assert max(part.numel() for part in absolute_parts(tensor)) <= piece
        assert parts(tensor) == sorted(tensor.abs().flatten().tolist())
