from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from halfserve.export.export_errors import ExportError
from halfserve.export.to_onnx.export_onnx import export_onnx
from tests.export.to_onnx.answers import difference, session


class Positions(nn.Module):
    """Adds a table of 12 positions: (batch, length, 4), and a row of factors (other,)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 4))

    def forward(self, x: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        length = x.shape[1]
        return x + self.table.narrow(0, 0, length), factors * 2


class Meeting(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class Listening(nn.Module):
    """Attention over the frames of a signal: (batch, length) -> (batch, frames, 4), with 60 or more samples."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Sequential(nn.Conv1d(1, 4, 10, 5), nn.Conv1d(4, 4, 3, 2), nn.Conv1d(4, 4, 3, 2))
        self.project = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.frames(x[:, None]).transpose(1, 2))[:, None]
        seen = torch.ones(y.shape[0], 1, y.shape[2], y.shape[2], dtype=torch.bool)
        return nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=seen)[:, 0]


class Pairs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1, 2).relu()


class Strided(nn.Module):
    """Adds numbers that it reads from a tensor one by one, as the heads of detectors do with their strides."""

    def __init__(self) -> None:
        super().__init__()
        self.strides = torch.tensor([8.0, 16.0])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x + torch.full((x.shape[1],), stride) for stride in self.strides], dim=1)


INPUTS = {"x": torch.randn(2, 3, 4), "factors": torch.randn(3)}


def shape(value: onnx.ValueInfoProto) -> list[str | int]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def limits(model: onnx.ModelProto) -> Any:
    return json.loads(next(entry.value for entry in model.metadata_props if entry.key == "halfserve.dimensions"))


def test_the_models_own_limits_hold_where_none_were_given_and_equal_sizes_stay_apart() -> None:
    module = Positions().eval()
    model = export_onnx(module, INPUTS, dynamic_shapes={"x": {0: "batch", -2: "length"}, "factors": ("other",)})
    assert [shape(value) for value in model.graph.input] == [["batch", "length", 4], ["other"]]
    assert limits(model) == {"batch": [1, None], "length": [1, 12], "other": [1, None]}
    opened = session(model)
    for batch, length, other in ((1, 1, 1), (3, 12, 5), (4, 4, 4)):
        inputs = {"x": torch.randn(batch, length, 4), "factors": torch.randn(other)}
        assert difference(module, opened, inputs) < 1e-6


@pytest.mark.long
def test_limits_can_be_given_and_examples_of_one_are_enough() -> None:
    sizes = {"x": {0: "batch", 1: Dim("length", min=2, max=10)}, "factors": {0: Dim.DYNAMIC}}
    model = export_onnx(Positions().eval(), {"x": torch.randn(1, 2, 4), "factors": torch.randn(1)}, dynamic_shapes=sizes)
    assert limits(model) == {"batch": [1, None], "length": [2, 10], "factors_dim_0": [2, None]}


@pytest.mark.long
def test_conditions_on_memory_layout_do_not_matter() -> None:
    torch.manual_seed(0)
    module = Listening().eval()
    model = export_onnx(module, torch.randn(2, 400), dynamic_shapes=({0: "batch", 1: "length"},))
    assert limits(model) == {"batch": [1, None], "length": [60, None]}
    opened = session(model)
    for batch, length in ((1, 60), (2, 400), (3, 401), (5, 777)):
        assert difference(module, opened, {"x": torch.randn(batch, length)}) < 1e-5


def test_conditions_on_a_size_itself_do() -> None:
    message = r"does not allow every size; torch suggests .* length = 2\*_length; where .* name them so \(2\*length\)"
    with pytest.raises(ExportError, match=message):
        export_onnx(Pairs().eval(), torch.randn(2, 6), dynamic_shapes=({0: "batch", 1: "length"},))


class OfTwo(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(2.0 * 3).reshape(2, 3)


class Chunked(nn.Module):
    """Takes parts of a batch, as many as there are in the example."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part.relu() for part in x.chunk(math.ceil(x.shape[0] / 2), 0)])


@pytest.mark.parametrize("module", [OfTwo().eval(), Chunked().eval()])
def test_a_batch_that_cannot_vary_is_told_with_what_takes_it_as_it_is(module: nn.Module) -> None:
    with pytest.raises(
        ExportError, match=r"serve it at one size: export_onnx\(\.\.\., dynamic_shapes=\{\}\) with a batch"
    ) as caught:
        export_onnx(module, torch.rand(2, 3))
    assert str(caught.value).endswith("--max-batch-size 0")
    assert export_onnx(module, torch.rand(2, 3), dynamic_shapes={}).graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2


class UNet(nn.Module):
    """Takes heights and widths that are multiples of 2, and runs on widths in between, which come out shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(4, 4, 2, stride=2)

    def forward(self, image: Tensor) -> Tensor:
        a = self.down(image)
        b = self.up(nn.functional.max_pool2d(a, 2))
        return torch.cat([b, a[..., : b.shape[3]]], dim=1)


@pytest.mark.long
@pytest.mark.parametrize("step", ["2*height", 2 * Dim("_height", min=1)])
def test_sizes_may_be_multiples(step: Any) -> None:
    module = UNet().eval()
    sizes = {"image": {0: "batch", 2: step, 3: "2*width"}}
    model = export_onnx(module, torch.rand(2, 3, 8, 8), dynamic_shapes=sizes)
    assert shape(model.graph.input[0]) == ["batch", 3, "2*_height", "2*_width"]
    assert limits(model) == {"batch": [1, None]}
    opened = session(model)
    for height, width in ((8, 8), (2, 2), (6, 12)):
        assert difference(module, opened, {"image": torch.rand(3, 3, height, width)}) < 1e-5
    smallest = session(export_onnx(module, torch.rand(1, 3, 2, 2), dynamic_shapes=sizes))
    assert difference(module, smallest, {"image": torch.rand(1, 3, 4, 6)}) < 1e-5


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"x": {1: "2*length"}}, r"dimension 'length' must be 2\*_length, with a whole number; it is 3 in 'x'"),
        ({"x": {1: "3*n"}, "factors": {0: "4*n"}}, "dimension 'n' is a multiple of 3 in one place and of 4 in another"),
        ({"x": {1: "2*"}}, r"'2\*' is no name for a dimension"),
        ({"y": None}, "dynamic_shapes names 'y'; the inputs are x, factors"),
        (({0: "batch"},), r"must have an entry for each of the 2 inputs \(x, factors\)"),
        ({"x": {3: "n"}}, r"dynamic_shapes of 'x' has axis 3; its shape is \(2, 3, 4\)"),
        ({"x": {0: "a batch"}}, "'a batch' is no name for a dimension"),
        ({"x": {0: 1.5}}, "has 1.5 at axis 0; expected a name or a torch.export.Dim"),
        ({"x": {0: "n", 1: "n"}}, "dimension 'n' must be one size .* it is 2 in 'x' and 3 in 'x'"),
        ({"x": {1: Dim("length", min=1, max=40)}}, "does not allow every size; torch suggests .*length = Dim.*max=12"),
    ],
)
def test_wishes_that_do_not_fit_are_refused(shapes: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message) as caught:
        export_onnx(Positions().eval(), INPUTS, dynamic_shapes=shapes)
    assert "\n" not in str(caught.value)


def test_an_input_whose_size_was_forgotten_is_suggested() -> None:
    class Masked(nn.Module):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return (ids * mask).sum(dim=1)

    expected = "theirs stays fixed; try --dynamic mask.1=length too; or else "
    with pytest.raises(ExportError, match=expected):
        export_onnx(Masked().eval(), {"ids": torch.rand(2, 5), "mask": torch.rand(2, 5)}, dynamic_shapes={"ids": {1: "length"}})


def test_sizes_that_must_be_one_need_one_name() -> None:
    with pytest.raises(ExportError, match="does not allow every size|for one; give examples"):
        export_onnx(Meeting().eval(), [torch.rand(3), torch.rand(3)], dynamic_shapes=({0: "n"}, {0: "m"}))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "options"), [(nn.LSTM, {"num_layers": 2, "bidirectional": True}), (nn.GRU, {"bias": False})])
def test_recurrent_layers_take_every_length(kind: Callable[..., nn.Module], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = kind(4, 4, **options).eval()
    model = export_onnx(module, torch.rand(3, 2, 4), dynamic_shapes=({0: "length", 1: "batch"},))
    assert type(module).__name__ in [node.op_type for node in model.graph.node]
    opened = session(model)
    for length, batch in ((1, 1), (3, 2), (9, 5)):
        assert difference(module, opened, {"input": torch.rand(length, batch, 4)}) < 1e-5


@pytest.mark.long
def test_plain_recurrent_layers_keep_their_length() -> None:
    module = nn.Sequential(nn.RNN(4, 4, batch_first=True)).eval()
    with pytest.raises(ExportError, match=r"fixes dimension 'length' at 3: it unrolls recurrent layers \(0\)"):
        export_onnx(module, torch.rand(2, 3, 4), dynamic_shapes=({0: "batch", 1: "length"},))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize(
    ("module", "inputs", "message"),
    [
        (Packed(), [torch.rand(2, 3, 4), torch.tensor([3, 2])], "packed sequences have no form in ONNX; give the layer"),
        (nn.LSTM(4, 4, proj_size=2), [torch.rand(2, 3, 4)], "an LSTM with proj_size has no form in ONNX; use LSTMCell"),
    ],
)
def test_what_onnx_has_no_recurrent_operator_for_is_said(module: nn.Module, inputs: list[Tensor], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export_onnx(module.eval(), inputs)


@pytest.mark.long
def test_numbers_that_are_read_from_a_tensor_are_no_sizes() -> None:
    model = export_onnx(Strided().eval(), torch.rand(2, 3))
    assert limits(model) == {"batch": [1, None]}
    assert difference(Strided(), session(model), {"x": torch.rand(5, 3)}) < 1e-6
