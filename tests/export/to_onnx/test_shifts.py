from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from export.to_onnx.export_onnx import export_onnx
from tests.export.to_onnx.answers import fed, session


class Shifted(nn.Module):
    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        return (x >> 0).float(), (x << 1).float(), x >> places, x << places, torch.stack([x & 15, (x >> 4) & 15], -1)


def require_same(x: Tensor, places: Tensor) -> None:
    found = fed(session(export_onnx(Shifted().eval(), [x, places])), {"x": x, "places": places})
    for (name, answer), wanted in zip(found.items(), Shifted()(x, places), strict=True):
        np.testing.assert_array_equal(answer, wanted.numpy(), err_msg=name)
        assert answer.dtype == wanted.numpy().dtype


def test_a_shifted_byte_stays_a_byte() -> None:
    require_same(torch.tensor([[200, 129, 3, 255]], dtype=torch.uint8), torch.tensor([[0, 1, 2, 4]], dtype=torch.uint8))


def test_a_shifted_whole_number_keeps_its_sign() -> None:
    require_same(torch.tensor([[-200, 129, -1, 1 << 40]]), torch.tensor([[0, 1, 2, 4]]))
