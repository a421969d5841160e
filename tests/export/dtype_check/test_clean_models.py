"""No false alarms: models that other people wrote and that run well in float16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfserve.export.dtype_check.finder import find_dtype_leaks

IDS = torch.tensor([[1, 5, 7, 2, 0, 3], [4, 4, 8, 9, 6, 0]])
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
SMALL: dict[str, Any] = {"vocab_size": 64, **SIZES}


class Residual(nn.Module):
    """A block as torchvision's ResNet has it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.body(x)
        return y.relu()


def resnet() -> nn.Module:
    tail = (nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(8, 3))
    return nn.Sequential(nn.Conv2d(3, 8, 3), Residual(), *tail)


def norms() -> nn.Module:
    return nn.Sequential(
        nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.Upsample(scale_factor=1.5, mode="bilinear"), nn.RMSNorm(12)
    )


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)


TORCH: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "cnn": (resnet, (torch.randn(2, 3, 16, 16),)),
    "norms": (norms, (torch.randn(2, 4, 8, 8),)),
    "lstm": (lambda: nn.LSTM(4, 8, 2, bidirectional=True), (torch.randn(5, 2, 4),)),
    "gru": (lambda: nn.GRU(4, 8), (torch.randn(5, 2, 4),)),
    "encoder": (encoder, (torch.randn(2, 5, 16),)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(64, 8), nn.LayerNorm(8), nn.GELU(), nn.Softmax(-1)), (IDS,)),
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH)
def test_torchs_own_layers(name: str) -> None:
    torch.manual_seed(0)
    make, inputs = TORCH[name]
    report = find_dtype_leaks(make(), *inputs)
    assert report.findings == (), str(report)


def test_a_constant_row_has_no_deviation_and_is_no_overflow() -> None:
    report = find_dtype_leaks(nn.LayerNorm(8, eps=1e-12), torch.ones(2, 8))
    assert report.findings == (), str(report)


def test_a_mask_of_ones_is_no_position() -> None:
    class Periodic(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (x * 9 * mask).sin()

    report = find_dtype_leaks(Periodic(), torch.ones(2, 8), torch.ones(2, 8, dtype=torch.int64))
    assert report.findings == (), str(report)


def test_the_whole_transformer_with_its_mask() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    x = torch.randn(2, 5, 16)
    report = find_dtype_leaks(model, x, x, tgt_mask=nn.Transformer.generate_square_subsequent_mask(5))
    assert report.clean, str(report)
    assert {note.kind for note in report.notes} <= {"export"}


@pytest.mark.long
@pytest.mark.parametrize("family", ["Bert", "GPT2", "Llama"])
@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_transformers_models(family: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config, model, inputs = {
        "Bert": ("BertConfig", "BertModel", {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}),
        "Llama": ("LlamaConfig", "LlamaForCausalLM", {"input_ids": IDS}),
        "GPT2": ("GPT2Config", "GPT2LMHeadModel", {"input_ids": IDS}),
    }[family]
    settings = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2} if family == "GPT2" else SMALL
    named: dict[str, Any] = dict(inputs)
    report = find_dtype_leaks(getattr(transformers, model)(getattr(transformers, config)(**settings)), **named)
    assert report.clean, str(report)
    assert {note.kind for note in report.notes} <= {"kept_float32"}, str(report)
