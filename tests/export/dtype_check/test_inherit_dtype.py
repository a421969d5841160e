from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from halfserve.export.dtype_check import dtype_inheritance as inherit
from halfserve.export.dtype_check.dtype_inheritance import new_arange, new_linspace
from halfserve.export.dtype_check.inherit_dtype import inherit_dtype
from halfserve.export.to_onnx.export_onnx import export_onnx
from tests.export.stored_models import answers

HALF = torch.float16

MAKERS: dict[str, Callable[[int], Tensor]] = {
    "zeros": lambda n: torch.zeros(n, 4),
    "ones": lambda n: torch.ones((n, 4)),
    "empty": lambda n: torch.empty(n, 4).fill_(1),
    "full": lambda n: torch.full((n, 4), 2.5),
    "eye": lambda _: torch.eye(4).sum(0),
    "tensor": lambda _: torch.tensor([1.0, 2, 3, 0.1]),
    "tensor of one": lambda _: torch.tensor(2.0),
    "as_tensor": lambda _: torch.as_tensor([0.5]),
    "scalar_tensor": lambda _: torch.scalar_tensor(3),
    "arange": lambda _: torch.arange(0.0, 4.0),
    "arange by a fraction": lambda _: torch.arange(0, 2, 0.5),
    "linspace": lambda n: torch.linspace(0, 1, n)[:, None],
    "window": lambda _: torch.hann_window(4),
    "quotient": lambda n: (torch.arange(n) / n)[:, None],
    "product": lambda _: torch.exp(torch.arange(4) * -0.5),
}
WHOLE: dict[str, Callable[[], Tensor]] = {
    "arange": lambda: torch.arange(4),
    "tensor": lambda: torch.tensor([1, 2]),
    "flags": lambda: torch.tensor([True]),
    "full": lambda: torch.full((2,), 7),
    "randint": lambda: torch.randint(0, 3, (2,)),
    "sum": lambda: torch.arange(4) + torch.tensor([1, 2, 3, 4]),
}
OWN_DTYPE: dict[str, tuple[Callable[[], Tensor], torch.dtype]] = {
    "zeros": (lambda: torch.zeros(2, dtype=torch.float64), torch.float64),
    "arange": (lambda: torch.arange(4, dtype=torch.float32), torch.float32),
    "array": (lambda: torch.tensor(np.zeros(2)), torch.float64),
    "scalar of numpy": (lambda: torch.tensor(np.float64(2.0)), torch.float64),
    "tensor": (lambda: torch.as_tensor(torch.ones(2, dtype=torch.float64)), torch.float64),
    "cast": (lambda: torch.arange(4).float(), torch.float32),
    "drawn about a tensor": (lambda: torch.normal(torch.zeros(2, dtype=torch.float64), 1.0), torch.float64),
    "out": (lambda: torch.zeros(2, out=torch.empty(2, dtype=torch.float64)), torch.float64),
}


class Bare(nn.Module):
    """Every maker in one model, since an export takes half a second."""

    @inherit_dtype
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: x + make(x.shape[0]) for name, make in MAKERS.items()}


@pytest.mark.parametrize("name", MAKERS)
def test_what_has_no_dtype_takes_the_surrounding_one(name: str) -> None:
    with inherit_dtype(HALF):
        assert MAKERS[name](3).dtype == HALF


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_stay_whole(name: str) -> None:
    expected = WHOLE[name]().dtype
    with inherit_dtype(HALF):
        assert WHOLE[name]().dtype == expected


@pytest.mark.parametrize("name", OWN_DTYPE)
def test_what_has_a_dtype_keeps_it(name: str) -> None:
    make, dtype = OWN_DTYPE[name]
    with inherit_dtype(HALF):
        assert make().dtype == dtype


def test_random_numbers_and_normal_draws() -> None:
    with inherit_dtype(HALF):
        assert {torch.rand(2).dtype, torch.randn(2).dtype, torch.normal(0.0, 1.0, (2,)).dtype} == {HALF}


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore:While compiling")  # Dynamo, about any mode that a model enters
def test_torch_export_keeps_dtypes_and_dynamic_sizes(strict: bool) -> None:
    module = Bare().half().eval()
    program = torch.export.export(
        module, (torch.ones(2, 4).half(),), dynamic_shapes=({0: torch.export.Dim("n")},), strict=strict
    )
    x = torch.ones(5, 4).half()
    made, expected = program.module()(x), module(x)
    for name, tensor in expected.items():
        assert tensor.dtype == HALF
        assert torch.equal(made[name], tensor), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_torch_compile_takes_the_whole_graph() -> None:
    x = torch.ones(3, 4).half()
    made = torch.compile(Bare(), backend="eager", fullgraph=True)(x)
    assert {name: tensor.dtype for name, tensor in made.items()} == dict.fromkeys(MAKERS, HALF)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_what_is_drawn_in_a_compiled_function_inherits_too() -> None:
    @inherit_dtype
    def drawn(x: Tensor) -> list[Tensor]:
        return [torch.normal(0.0, 1.0, x.shape), torch.rand(2), torch.randn(2)]

    compiled = torch.compile(drawn, backend="eager", fullgraph=True)
    assert {tensor.dtype for tensor in compiled(torch.ones(3, 4).half())} == {HALF}


@pytest.mark.long
def test_onnx_gets_the_same_numbers() -> None:
    module = Bare().half().eval()
    x = torch.ones(3, 4).half()
    model = export_onnx(module, torch.ones(2, 4).half(), dynamic_shapes=({0: "n"},))
    outputs = answers(model, {"x": x.numpy()}, "ORT_ENABLE_ALL")
    expected = module(x)
    for name, output in outputs.items():
        assert output.dtype == np.float16
        assert np.abs(output - expected[name].numpy()).max() <= 2e-3, name


@given(start=st.floats(-50, 50), count=st.integers(1, 40), step=st.floats(0.125, 4))
def test_ranges_are_rounded_once(start: float, count: int, step: float) -> None:
    x = torch.zeros(1).half()
    with inherit_dtype(x):
        counted = torch.arange(start, start + count * step, step)
        spaced = torch.linspace(start, start + count, count)
    assert torch.equal(counted, new_arange(x, start, start + count * step, step))
    assert torch.equal(spaced, new_linspace(x, start, start + count, count))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.full((2,), -1e9), r"full: -1e\+09 does not fit torch.float16 .*use mask_value\(x\) or rescale"),
        (lambda: torch.tensor([1.0, 1e5]), "tensor: 100000 does not fit"),
        (lambda: torch.scalar_tensor(70000), "scalar_tensor: 70000 does not fit"),
        (lambda: torch.arange(0.0, 1e5), "arange: 99999 does not fit"),
        (lambda: torch.linspace(0, 1e6, 3), r"linspace: 1e\+06 does not fit"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(make: Callable[[], Tensor], message: str) -> None:
    with inherit_dtype(HALF), pytest.raises(ValueError, match=message):
        make()
    assert torch.zeros(1).dtype == torch.float32


def test_infinity_fits() -> None:
    with inherit_dtype(HALF):
        assert torch.full((1,), float("-inf")).dtype == HALF


def test_regions_nest_and_an_exception_leaves_them() -> None:
    with inherit_dtype(HALF):
        with inherit_dtype(torch.float64):
            assert torch.zeros(1).dtype == torch.float64
        with inherit_dtype(torch.float64), pytest.raises(ValueError, match="could not convert"):
            float("half")
        with pytest.raises(RuntimeError, match="shape"):
            inherit_dtype(torch.float64)(torch.ones(2).view)(3)
        with inherit_dtype(torch.float32):
            assert torch.zeros(1).dtype == torch.float32
        assert torch.zeros(1).dtype == HALF
    assert torch.zeros(1).dtype == torch.float32


def test_other_threads_are_not_touched() -> None:
    seen: list[torch.dtype] = []
    with inherit_dtype(HALF):
        thread = threading.Thread(target=lambda: seen.append(torch.zeros(1).dtype))
        thread.start()
        thread.join()
    assert seen == [torch.float32]


def test_without_a_source_the_first_floating_tensor_that_is_met_decides() -> None:
    x = torch.ones(2).half()
    with inherit_dtype():
        early = torch.zeros(1)
        x = x + 1
        late = torch.zeros(1)
    assert (early.dtype, late.dtype) == (torch.float32, HALF)


def test_a_decorated_function_looks_at_each_call_anew() -> None:
    @inherit_dtype()
    def padded(parts: list[Tensor], *, extra: Tensor | None = None) -> Tensor:
        """Adds zeros."""
        return torch.zeros(2) if extra is None else parts[0] + extra

    assert padded.__doc__ == "Adds zeros."
    for dtype in (HALF, torch.float64, torch.bfloat16):
        assert padded([torch.arange(2), torch.ones(1, dtype=dtype)]).dtype == dtype


def test_a_module_lends_its_parameters_dtype_where_inputs_have_none() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 4)

        @inherit_dtype
        def forward(self, ids: Tensor) -> Tensor:
            start = torch.zeros(4)
            return start + self.embedding(ids)  # type: ignore[no-any-return]  # (nn.Module's call is untyped)

    model = Tokens().half()
    assert model(torch.tensor([1, 2])).dtype == HALF
    with inherit_dtype(model):
        assert torch.zeros(1).dtype == HALF


def test_the_device_is_inherited_unless_something_else_chooses_it() -> None:
    meta = torch.ones(1, device="meta", dtype=HALF)
    with inherit_dtype(meta):
        assert {torch.zeros(1).device.type, torch.arange(3).device.type, torch.tensor([1.0]).device.type} == {"meta"}
        assert torch.zeros(1, device="cpu").device.type == "cpu"
        assert torch.rand(1, generator=torch.Generator()).device.type == "cpu"
        assert torch.as_tensor(torch.zeros(1, device="cpu")).device.type == "cpu"


def test_wrong_sources_are_refused() -> None:
    wrong: list[tuple[Any, str]] = [
        (torch.int64, "got torch.int64"),
        (torch.zeros(1, dtype=torch.int32), "got a tensor of torch.int32"),
        (nn.ReLU(), "got a ReLU"),
        ("float16", "got a str"),
        (nn.Linear, "got the class Linear"),
    ]
    for source, message in wrong:
        with pytest.raises(TypeError, match=f"inherit_dtype: expected .*{message}"):
            inherit_dtype(source)


def test_generators_and_coroutines_are_refused() -> None:
    def steps() -> Iterator[Tensor]:
        yield torch.zeros(1)

    async def later() -> Tensor:
        await asyncio.sleep(0)
        return torch.zeros(1)

    for function in (steps, later):
        with pytest.raises(TypeError, match="is a generator or coroutine; use `with` around its steps"):
            inherit_dtype(function)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_compiled_code_must_name_the_source() -> None:
    def unnamed(x: Tensor) -> Tensor:
        with inherit_dtype():
            return x + torch.zeros(x.shape)

    assert unnamed(torch.ones(2).half()).dtype == HALF
    with pytest.raises(Exception, match="(?s)inherit_dtype|Observed exception"):
        torch.compile(unnamed, backend="eager", fullgraph=True)(torch.ones(2).half())


Maker: TypeAlias = Callable[[Tensor], Tensor]

KNOWN_MAKERS: dict[str, Maker] = {
    "zeros": lambda x: inherit.new_zeros(x, x.shape[0], x.shape[1]),
    "ones": lambda x: inherit.new_ones(x, x.shape),
    "full": lambda x: inherit.new_full(x, x.shape[1], 2.5),
    "tensor": lambda x: inherit.new_tensor(x, [1.0, -0.1]).sum(),
    "arange": lambda x: inherit.new_arange(x, x.shape[1]),
    "arange down": lambda x: inherit.new_arange(x, x.shape[1] - 1, -1, -1),
    "arange fraction": lambda x: inherit.new_arange(x, 0, x.shape[1], 0.7)[-1],
    "linspace": lambda x: inherit.new_linspace(x, -1, 3.3, x.shape[1]),
    "eye": lambda x: inherit.new_eye(x, x.shape[1]).sum(0),
    "causal": lambda x: inherit.causal_mask(x, x.shape[1])[-1],
    "mask value": lambda x: x.masked_fill(x > 0, inherit.mask_value(x)),
}
floats = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


class Made(nn.Module):
    """Every maker at once, since an export takes half a second."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: x * 0 + make(x) for name, make in KNOWN_MAKERS.items()}


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.long)])
def test_the_exported_model_follows_sizes_and_dtype(dtype: torch.dtype) -> None:
    module = Made().eval()
    model = export_onnx(module, torch.ones(2, 5, dtype=dtype), dynamic_shapes=({0: "batch", 1: "n"},))
    for shape in ((3, 9), (4, 1), (1, 3000)):
        x = torch.ones(shape, dtype=dtype)
        expected = module(x)
        for name, output in answers(model, {"x": x.numpy()}, "ORT_ENABLE_ALL").items():
            assert torch.equal(torch.from_numpy(output), expected[name]), name


@given(dtype=floats, start=st.integers(-3000, 3000), count=st.integers(0, 50), step=st.integers(-9, 9).filter(bool))
def test_arange_rounds_the_true_numbers_once(dtype: torch.dtype, start: int, count: int, step: int) -> None:
    made = inherit.new_arange(torch.zeros(1, dtype=dtype), start, start + count * step, step)
    assert made.tolist() == torch.tensor([start + i * step for i in range(count)], dtype=torch.float64).to(dtype).tolist()


@given(dtype=floats, start=st.floats(-100, 100), end=st.floats(-100, 100), steps=st.integers(1, 40))
def test_linspace_meets_both_ends_and_torch(dtype: torch.dtype, start: float, end: float, steps: int) -> None:
    made = inherit.new_linspace(torch.zeros(1, dtype=dtype), start, end, steps)
    exact = torch.linspace(start, end, steps, dtype=torch.float64)
    assert made.dtype == dtype
    assert made[0] == exact[0].to(dtype)
    assert torch.allclose(made.double(), exact, rtol=torch.finfo(dtype).eps, atol=100 * max(torch.finfo(dtype).eps, 1e-7))


@given(dtype=floats, n=st.integers(1, 12))
def test_the_causal_mask_hides_the_future_and_nothing_else(dtype: torch.dtype, n: int) -> None:
    scores = torch.zeros(n, n, dtype=dtype)
    weights = (scores + inherit.causal_mask(scores, n)).softmax(-1)
    assert torch.equal(weights > 0, torch.ones(n, n).tril() > 0)


def test_a_fully_masked_row_has_weights() -> None:
    scores = torch.randn(1, 4).half()
    assert (scores.masked_fill(torch.ones(1, 4) > 0, inherit.mask_value(scores)).softmax(-1) == 0.25).all()


def test_counting_goes_on_past_2048_in_half() -> None:
    assert inherit.new_arange(torch.zeros(1).half(), 2049, 4000, 2).unique().numel() > 480  # type: ignore[no-untyped-call]  # (torch's own)


def test_tensors_and_arrays_are_taken_as_data() -> None:
    x = torch.zeros(1).half()
    assert inherit.new_tensor(x, torch.ones(2)).dtype == torch.float16
    assert inherit.new_tensor(x, torch.ones(2).numpy()).dtype == torch.float16
    assert inherit.new_empty(x, 2, 3).shape == (2, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: inherit.new_full(x, 2, 1e9), r"new_full: 1e\+09 does not fit torch.float16 \(largest value 65504\)"),
        (lambda x: inherit.new_tensor(x, [0, [2e5]]), "new_tensor: 200000 does not fit"),
        (lambda x: inherit.new_arange(x, 70000), "new_arange: 69999 does not fit"),
        (lambda x: inherit.new_linspace(x, 0, -1e6, 3), r"new_linspace: -1e\+06 does not fit"),
        (lambda x: inherit.new_arange(x, 0, 3, 0), "new_arange: step is 0"),
    ],
)
def test_what_half_cannot_hold_is_refused(make: Maker, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(torch.zeros(1).half())


def test_limits_of_integers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a floating tensor to take limits from, got torch\.int64"):
        inherit.mask_value(torch.zeros(1, dtype=torch.int64))
