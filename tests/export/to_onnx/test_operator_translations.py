from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from halfserve.export.export_errors import ExportError
from halfserve.export.half_module.to_half import to_half
from halfserve.export.to_onnx.export_onnx import export_onnx
from tests.export.to_onnx.answers import difference, fed, session

PLACES = torch.tensor([[0, 0, 2], [1, 0, 0]])


class Calling(nn.Module):
    """A function of one or two inputs."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.function(x) if y is None else self.function(x, y)


def mean_of_places(*, include_self: bool) -> nn.Module:
    return Calling(lambda x, y: x.scatter_reduce(1, PLACES, y, "mean", include_self=include_self)).eval()


@pytest.mark.parametrize("function", [torch.logaddexp, torch.logaddexp2])
def test_a_sum_of_exponentials_holds_far_from_zero(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    far = torch.tensor([[-500.0, 300.0, 0.5, -math.inf, -math.inf, math.inf]])
    near = torch.tensor([[-501.0, 299.5, -0.5, -math.inf, 7.0, 7.0]])
    module = Calling(function).eval()
    model = export_onnx(module, [far, near])
    np.testing.assert_allclose(fed(session(model), {"x": far, "y": near})["output"], module(far, near), rtol=1e-6)


@pytest.mark.long
def test_a_sum_of_exponentials_holds_in_half() -> None:
    module = Calling(torch.logaddexp).eval()
    inputs = {"x": torch.tensor([[-50.0, 30.0]]), "y": torch.tensor([[-51.0, 29.5]])}
    opened = session(export_onnx(to_half(module).module, [value.half() for value in inputs.values()]))
    assert difference(module, opened, inputs, half=True) < 1e-3


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(), ({0: "batch", 1: "length"},)], ids=["fixed", "of any length"])
def test_a_running_sum_of_exponentials_holds_far_below_the_largest(sizes: tuple[Any, ...]) -> None:
    class Running(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.logcumsumexp(x, 1), torch.logcumsumexp(x, -1)

    x = torch.arange(2 * 7 * 3).reshape(2, 7, 3) * 40.0 - 900
    opened = session(export_onnx(Running().eval(), {"x": x}, dynamic_shapes=sizes))
    assert difference(Running(), opened, {"x": x}) < 1e-6
    if sizes:
        longer = torch.cat([x, x.flip(1), x[:, :4] * 0.01], dim=1)[:1]
        np.testing.assert_allclose(fed(opened, {"x": longer})["output_0"], torch.logcumsumexp(longer, 1), rtol=1e-5)
    half = session(export_onnx(to_half(Running().eval()).module, {"x": x.half()}, dynamic_shapes=sizes))
    assert difference(Running(), half, {"x": x}, half=True) < 1e-3


@pytest.mark.long
def test_the_logarithm_of_a_sigmoid_holds_far_from_zero() -> None:
    x = torch.tensor([[-500.0, -30, -15, -1, 0, 1, 30]])
    model = export_onnx(nn.LogSigmoid().eval(), x)
    np.testing.assert_allclose(fed(session(model), {"input": x})["output"], nn.LogSigmoid()(x), rtol=1e-5, atol=1e-12)
    double = session(export_onnx(nn.LogSigmoid().eval(), x.double()))
    np.testing.assert_allclose(fed(double, {"input": x.double()})["output"], nn.LogSigmoid()(x.double()), rtol=1e-5, atol=1e-12)
    half = session(export_onnx(to_half(nn.LogSigmoid().eval()).module, x.half()))
    assert difference(nn.LogSigmoid(), half, {"input": x}, half=True) < 1e-3


@pytest.mark.long
@pytest.mark.parametrize("include_self", [True, False])
def test_a_mean_of_what_is_scattered_divides(include_self: bool) -> None:
    inputs = {"x": torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]]), "y": torch.tensor([[10.0, 20, 30], [40, 50, 60]])}
    module = mean_of_places(include_self=include_self)
    assert difference(module, session(export_onnx(module, inputs, dynamic_shapes=())), inputs) < 1e-6


@pytest.mark.long
def test_a_mean_of_whole_numbers_is_refused() -> None:
    with pytest.raises(ExportError, match="'mean' of whole numbers"):
        export_onnx(mean_of_places(include_self=True), [torch.ones(2, 4).int(), torch.ones(2, 3).int()], dynamic_shapes=())


@pytest.mark.long
def test_a_loss_of_smoothed_labels_is_refused_and_another_is_right() -> None:
    inputs = {"x": torch.tensor([[0.1, 2.0, -1.0], [1.0, 0.0, 3.0]]), "y": torch.tensor([1, 0])}
    weight = torch.tensor([1.0, 2.0, 0.5])
    plain = Calling(nn.CrossEntropyLoss(weight=weight, ignore_index=2)).eval()
    assert difference(plain, session(export_onnx(plain, inputs)), inputs) < 1e-6
    with pytest.raises(ExportError, match="label_smoothing has no form in ONNX"):
        export_onnx(Calling(nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)).eval(), inputs)


@pytest.mark.long
@pytest.mark.parametrize("function", [torch.special.erfcx, torch.special.log_ndtr])
def test_tails_of_the_normal_distribution_hold(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([[-9.0, -5, -1, -0.1, 0, 0.1, 1, 3, 5, 9, 20, 90, 1e4, math.inf]])
    x = x if function is torch.special.erfcx else -x[:, :-1]
    answer = fed(session(export_onnx(Calling(function).eval(), x)), {"x": x})["output"]
    np.testing.assert_allclose(answer, function(x), rtol=3e-6, atol=2e-8)


SIDES = [0.0, -0.0, 1.0, -1.0, 2.5, -2.5, math.inf, -math.inf, math.nan]
Y, X = (torch.tensor([side]) for side in zip(*itertools.product(SIDES, SIDES), strict=True))


def require_same(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    module = Calling(function).eval()
    found = fed(session(export_onnx(module, inputs)), dict(zip("xy", inputs, strict=False)))["output"]
    wanted = module(*inputs).numpy()
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=2e-3 if wanted.dtype == np.float16 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_an_angle_is_in_the_quarter_that_both_signs_say(dtype: torch.dtype) -> None:
    require_same(torch.atan2, Y.to(dtype), X.to(dtype))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_a_float_less_whole_numbers_is_a_float(dtype: torch.dtype) -> None:
    mask = torch.tensor([[0, 1, 1], [3, 0, 2]], dtype=dtype)
    require_same(lambda x: (1.0 - x) * -10000.0, mask)
    require_same(lambda x: torch.rsub(x, 0.5).float() + (7 - x), mask)


@pytest.mark.long
def test_an_angle_of_a_complex_number_is_the_one_between_its_parts() -> None:
    require_same(lambda real, imaginary: torch.complex(real, imaginary).angle(), X, Y)
    require_same(lambda x: torch.angle(torch.fft.rfft(x))[..., :2], torch.tensor([[-1.0, -2, -3, -4.5], [1, 2, 3, 4]]))


@pytest.mark.long
@pytest.mark.parametrize(
    "x",
    [torch.tensor([SIDES]), torch.tensor([SIDES]).half(), torch.tensor([[-3, 0, 3]]), torch.tensor([[True, False]])],
    ids=["float32", "float16", "int64", "bool"],
)
def test_an_angle_of_a_real_number_is_half_a_turn_or_none(x: Tensor) -> None:
    require_same(torch.angle, x)


@pytest.mark.long
@pytest.mark.parametrize(
    "x", [torch.tensor([SIDES]), torch.tensor([SIDES]).half(), torch.tensor([[-3, 0, 3]])], ids=["float32", "float16", "int64"]
)
def test_the_sign_of_a_zero_is_seen(x: Tensor) -> None:
    require_same(torch.signbit, x)


class Shifted(nn.Module):
    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        return (x >> 0).float(), (x << 1).float(), x >> places, x << places, torch.stack([x & 15, (x >> 4) & 15], -1)


def require_same_shifts(x: Tensor, places: Tensor) -> None:
    found = fed(session(export_onnx(Shifted().eval(), [x, places])), {"x": x, "places": places})
    for (name, answer), wanted in zip(found.items(), Shifted()(x, places), strict=True):
        np.testing.assert_array_equal(answer, wanted.numpy(), err_msg=name)
        assert answer.dtype == wanted.numpy().dtype


def test_a_shifted_byte_stays_a_byte() -> None:
    require_same_shifts(torch.tensor([[200, 129, 3, 255]], dtype=torch.uint8), torch.tensor([[0, 1, 2, 4]], dtype=torch.uint8))


@pytest.mark.long
def test_a_shifted_whole_number_keeps_its_sign() -> None:
    require_same_shifts(torch.tensor([[-200, 129, -1, 1 << 40]]), torch.tensor([[0, 1, 2, 4]]))


class Guarded(nn.Module):
    """Divisions that an epsilon guards, and a factor next to 1."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return 1 / (x + self.epsilon), 1 / (x - self.epsilon), x * (1 + 1e-6), x / (1 + 1e-6)


class Idle(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu((x + 0.0 - 0.0) * 1.0 / 1.0)


@pytest.mark.long
@pytest.mark.parametrize("epsilon", [1e-8, 1e-12, 1e-30])
def test_the_smallest_epsilon_stays(epsilon: float) -> None:
    module, x = Guarded(epsilon).eval(), torch.tensor([[0.0, 1.0, -3.0]])
    found = session(export_onnx(module, x)).run(None, {"x": x.numpy()})
    for wanted, answer in zip(module(x), found, strict=True):
        torch.testing.assert_close(torch.from_numpy(answer), wanted, rtol=1e-7, atol=0)


def test_what_changes_nothing_goes() -> None:
    model = export_onnx(Idle().eval(), torch.randn(2, 3))
    assert [node.op_type for node in model.graph.node] == ["Relu"]


LOAD = "import onnxruntime, sys; onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])"


class TimeFirst(nn.Module):
    """(batch, time, 8) -> (time, batch, 8), multiplied twice; the transposed tensor may be an output too."""

    def __init__(self, *, shown: bool) -> None:
        super().__init__()
        self.first, self.second, self.shown = nn.Linear(8, 4), nn.Linear(8, 6), shown

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        turned = x.transpose(0, 1)
        results = (self.first(turned), self.second(turned))
        return (*results, turned) if self.shown else results


@pytest.mark.long
@pytest.mark.parametrize("shown", [False, True])
def test_time_first_products_load_at_every_level_and_answer_the_same(shown: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = TimeFirst(shown=shown).eval()
    path = tmp_path / "model.onnx"
    sizes = ({0: "batch", 1: "time"},)
    model = export_onnx(module.half(), torch.rand(2, 3, 8).half(), path, dynamic_shapes=sizes)
    subprocess.run([sys.executable, "-c", LOAD, str(path)], check=True, capture_output=True)
    assert len([node for node in model.graph.node if node.op_type == "Transpose"]) == 2 + shown
    assert difference(module.float(), session(model), {"x": torch.rand(5, 4, 8)}, half=True) < 2e-3


def test_float32_is_left_as_it_is() -> None:
    model = export_onnx(TimeFirst(shown=False).eval(), torch.rand(2, 3, 8))
    assert next(node.op_type for node in model.graph.node) == "Transpose"


class Skipping(nn.Module):
    """A layer that is left out where the flag says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        doubled = x * 2
        return torch.cond(flag, self.layer, torch.clone, (doubled,))  # type: ignore[no-any-return]  # (torch's is untyped)


class Bags(nn.Module):
    """The mean of each row's embeddings, which torch expresses as a loop with branches that change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.bag(ids)
        return found


@pytest.mark.long
@pytest.mark.parametrize("flag", [True, False])
def test_a_branch_that_changes_nothing_gives_a_value_of_its_own(flag: bool) -> None:
    module, x = Skipping().eval(), torch.randn(2, 4)
    opened = session(export_onnx(module, [x, torch.tensor(flag)]))
    (found,) = opened.run(None, {"x": x.numpy(), "flag": torch.tensor(flag).numpy()})
    torch.testing.assert_close(torch.from_numpy(found), module(x, torch.tensor(flag)).detach())


@pytest.mark.long
def test_a_mean_of_embeddings_is_exported() -> None:
    module, ids = Bags().eval(), torch.tensor([[1, 2, 3], [4, 5, 8]])
    (found,) = session(export_onnx(module, ids, dynamic_shapes=())).run(None, {"ids": ids.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), module(ids).detach())
