"""What the dispatch mode sees of each operation, and the magnitudes that it keeps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

from halfserve import Policy, autocast
from halfserve.amp_core.recorder import observations
from halfserve.amp_core.recorder.observations import DeviceMagnitudes, HostMagnitudes, absolute_parts
from halfserve.amp_core.recorder.record import Magnitudes
from tests.amp_core.recorder.recording import ops, recorded, the


def test_the_dtypes_under_autocast_and_under_a_policy() -> None:
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)

    def body(policy: Policy | None) -> None:
        with autocast("cpu", torch.float16, policy=policy):
            layer(x).softmax(-1).sum().backward()

    native = recorded(lambda: body(None), layer)
    assert the(native, "addmm").inputs == ("float16", "float16", "float16")
    assert the(native, "addmm").dtype == "float16"
    assert the(native, "_softmax").dtype == "float16"
    assert {entry.dtype for entry in native.entries if entry.op == "aten.mm.default"} == {"float16"}
    changed = recorded(lambda: body(Policy().fp32("linear", "softmax")), layer)
    assert (the(changed, "addmm").dtype, the(changed, "_softmax").dtype) == ("float32", "float32")


def test_ranges_and_losses_are_those_of_the_output() -> None:
    entry = the(recorded(lambda: torch.tensor([-3.0, 0.0, 1e6, 1e-9, 1e-6, math.inf, math.nan]) * 1.0), "mul")
    found = entry.magnitudes
    assert (found.elements, found.non_finite, found.zeros) == (7, 2, 1)
    assert (found.overflow, found.underflow, found.subnormal) == (1, 1, 1)
    assert found.largest == 1e6
    assert found.smallest == pytest.approx(1e-9)
    assert entry.unscaled_largest == found.largest
    assert entry.unscaled_smallest == found.smallest


def test_each_output_is_told_apart() -> None:
    x = torch.ones(2, 4)
    record = recorded(lambda: functional.layer_norm(x, (4,)))
    assert [entry.output for entry in record.entries] == [0, 1, 2]
    assert the(record, "native_layer_norm", output=1).magnitudes.largest == 1.0


def test_what_is_written_in_place_or_to_out() -> None:
    x, out = torch.ones(3), torch.empty(3)

    def body() -> None:
        x.mul_(5.0)
        torch.add(x, 1.0, out=out)
        torch._foreach_mul_([x, out], 2.0)

    record = recorded(body)
    assert the(record, "mul_").magnitudes.largest == 5.0
    assert the(record, "add").magnitudes.largest == 6.0
    assert (the(record, "_foreach_mul_").calls, the(record, "_foreach_mul_").magnitudes.largest) == (2, 12.0)


def test_views_fresh_memory_and_integers_are_left_out() -> None:
    def body() -> None:
        x = torch.empty(4, 6)
        x.view(2, 12).t().squeeze_()[0].detach()
        torch.empty_like(x).new_empty(3).resize_(2)
        torch.arange(3) + 1
        torch.ones(2).gt(0)
        torch.split(x, 2)

    assert ops(recorded(body)) == ["ones"]


def test_lists_go_in_as_their_dtypes() -> None:
    parts = [torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.float16)]
    assert the(recorded(lambda: torch.cat(parts)), "cat").inputs == ("float32", "float16")


def test_embedding_with_sparse_gradients() -> None:
    layer = nn.Embedding(5, 3, sparse=True)
    record = recorded(lambda: (layer(torch.tensor([1, 1])) * 3).sum().backward(), layer)
    assert the(record, "embedding").inputs == ("float32", "int64")
    assert [entry.magnitudes.largest for entry in record.entries if entry.direction == "backward"][-1] == 3.0
    assert layer.weight.grad is not None
    assert layer.weight.grad.is_sparse


def test_the_inverse_transform_of_complex_numbers() -> None:
    spectrum = torch.fft.fft(torch.tensor([3.0, 0.0, -70000.0]))
    found = the(recorded(lambda: spectrum * 1), "mul")
    assert (found.dtype, found.magnitudes.elements, found.magnitudes.overflow) == ("complex64", 6, 1)


def test_fake_and_meta_tensors_count_and_have_no_range() -> None:
    x = torch.ones(2, device="meta")
    with FakeTensorMode():
        y = torch.ones(3)
    record = recorded(lambda: (x * 2, y.exp(), torch.ones(0).tanh()))
    for op in ("mul", "exp", "tanh"):
        assert (the(record, op).calls, the(record, op).magnitudes.elements, the(record, op).magnitudes.largest) == (1, 0, None)


def test_a_wrapper_shows_what_is_in_it() -> None:
    pair = TwoTensor(torch.full((2, 2), 2.0), torch.full((2, 2), 3.0))  # type: ignore[no-untyped-call]
    found = the(recorded(lambda: pair @ pair), "mm")
    assert (found.calls, found.magnitudes.largest, found.magnitudes.smallest) == (2, 18.0, 8.0)


def test_function_transforms() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    results: list[Tensor] = []
    per_sample = torch.func.vmap(torch.func.grad(lambda row: (row * row).sum()))
    record = recorded(lambda: results.append(per_sample(x)))
    assert torch.equal(results[0], 2 * x)
    assert max(entry.magnitudes.largest or 0 for entry in record.entries if entry.op == "aten.mul.Tensor") == 16.0


def test_inference_mode() -> None:
    layer = nn.Linear(4, 4)

    def body() -> None:
        with torch.inference_mode():
            layer(torch.ones(2, 4))

    assert the(recorded(body, layer), "linear").module == "."


@torch.library.custom_op("halfserve_tests::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b).clone()


@torch.library.custom_op("halfserve_tests::known_product", mutates_args=())
def known_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b).clone()


known_product.register_autocast("cpu", torch.float32)


@pytest.mark.parametrize(("op", "dtype"), [(product, torch.bfloat16), (known_product, torch.float32)])
def test_an_own_operation_runs_under_the_autocast_it_was_called_in(op: Any, dtype: torch.dtype) -> None:
    x = torch.ones(2, 2)
    results: list[Tensor] = []

    def body() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            results.append(op(x, x))

    body()
    record = recorded(body)
    assert [result.dtype for result in results] == [dtype, dtype]
    assert str(dtype).removeprefix("torch.") in {entry.dtype for entry in record.entries if "product" in entry.op}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_operations_that_take_functions() -> None:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415  (imports torch._dynamo)

    q = torch.randn(1, 1, 16, 8)
    plain: list[Tensor] = []
    record = recorded(lambda: plain.append(flex_attention(q, q, q)))
    assert any("flex_attention" in entry.op for entry in record.entries) or "bmm" in ops(record)


KINDS = [HostMagnitudes, DeviceMagnitudes]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EDGES = [0.0, -0.0, 2.0**-24, 2.0**-25, 2.0**-14, -(2.0**-14), 2.0**-15, 65504.0, -65504.0, 65536.0]
EDGES += [math.inf, -math.inf, math.nan]
numbers = st.one_of(st.sampled_from(EDGES), st.floats(width=32), st.floats(-2.0, 2.0, width=32))
batches = st.lists(st.lists(numbers, min_size=1, max_size=20), max_size=4)


def expected(tensors: list[torch.Tensor]) -> Magnitudes:
    values = np.abs(np.concatenate([np.zeros(0), *(tensor.double().numpy() for tensor in tensors)]))
    finite = values[np.isfinite(values)]
    rest = finite[finite > 0]
    return Magnitudes(
        elements=len(values),
        non_finite=len(values) - len(finite),
        zeros=len(finite) - len(rest),
        overflow=int((rest > 65504).sum()),
        underflow=int((rest < 2.0**-24).sum()),
        subnormal=int(((rest >= 2.0**-24) & (rest < 2.0**-14)).sum()),
        largest=float(rest.max()) if len(rest) else None,
        smallest=float(rest.min()) if len(rest) else None,
    )


def measured(kind: Any, tensors: list[torch.Tensor]) -> Magnitudes:
    running = kind()
    for tensor in tensors:
        for part in absolute_parts(tensor):
            running.add(part)
    result = running.result()
    assert isinstance(result, Magnitudes)
    return result


@pytest.mark.parametrize("kind", KINDS)
@given(values=batches, dtype=st.sampled_from(DTYPES))
def test_they_are_what_numpy_finds(kind: Any, values: list[list[float]], dtype: torch.dtype) -> None:
    tensors = [torch.tensor(batch, dtype=dtype) for batch in values]
    assert measured(kind, tensors) == expected(tensors)


@given(first=batches, second=batches)
def test_the_magnitudes_of_two_groups_are_those_of_all(first: list[list[float]], second: list[list[float]]) -> None:
    one, two = ([torch.tensor(batch) for batch in values] for values in (first, second))
    assert Magnitudes.of_all([measured(HostMagnitudes, one), measured(HostMagnitudes, two)]) == expected(one + two)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # said by the call that turns it on, too
def test_a_device_is_not_waited_for() -> None:
    tensors = [torch.randn(64, 64, device="cuda", dtype=torch.float16) * 1e-5 for _ in range(3)]
    try:
        torch.cuda.set_sync_debug_mode("error")
        running = DeviceMagnitudes()
        for tensor in tensors:
            for part in absolute_parts(tensor):
                running.add(part)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert running.result() == expected([tensor.cpu().flatten() for tensor in tensors])


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


@given(shape=st.lists(st.integers(1, 7), min_size=1, max_size=4), piece=st.integers(1, 9), data=st.data())
def test_large_tensors_come_in_pieces(shape: list[int], piece: int, data: st.DataObject) -> None:
    tensor = torch.randn(shape).permute(data.draw(st.permutations(range(len(shape)))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observations, "PIECE", piece)
        assert max(part.numel() for part in absolute_parts(tensor)) <= piece
        assert parts(tensor) == sorted(tensor.abs().flatten().tolist())
