from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from halfserve.export.to_onnx.export_onnx import export_onnx
from tests.export.to_onnx.answers import difference, session


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
