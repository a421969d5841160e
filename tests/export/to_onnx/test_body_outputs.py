from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from export.to_onnx.export_onnx import export_onnx
from tests.export.to_onnx.answers import session


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


@pytest.mark.parametrize("flag", [True, False])
def test_a_branch_that_changes_nothing_gives_a_value_of_its_own(flag: bool) -> None:
    module, x = Skipping().eval(), torch.randn(2, 4)
    opened = session(export_onnx(module, [x, torch.tensor(flag)]))
    (found,) = opened.run(None, {"x": x.numpy(), "flag": torch.tensor(flag).numpy()})
    torch.testing.assert_close(torch.from_numpy(found), module(x, torch.tensor(flag)).detach())


def test_a_mean_of_embeddings_is_exported() -> None:
    module, ids = Bags().eval(), torch.tensor([[1, 2, 3], [4, 5, 8]])
    (found,) = session(export_onnx(module, ids, dynamic_shapes=())).run(None, {"ids": ids.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), module(ids).detach())
