"""The forward pass is right in every dtype, and padding has no say in it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from amp_core import autocast
from examples.transformer.attention import SelfAttention
from examples.transformer.data import LENGTH, NO_TARGET, data
from examples.transformer.loss import accuracy, loss
from examples.transformer.model import Sorter, model


@pytest.fixture
def sorter() -> Sorter:
    torch.manual_seed(0)
    return Sorter().eval()


@pytest.fixture
def tokens() -> Tensor:
    tokens: Tensor = data()[1].tensors[0][:6]
    return tokens


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_low_model_answers_in_its_dtype_what_the_full_one_answers(sorter: Sorter, tokens: Tensor, dtype: torch.dtype) -> None:
    full = sorter(tokens)
    low = sorter.to(dtype)(tokens)
    assert (low.dtype, low.shape) == (dtype, (6, LENGTH, 10))
    torch.testing.assert_close(low.float(), full, atol=8 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("policy", ["native", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_autocast_it_answers_the_same(sorter: Sorter, tokens: Tensor, dtype: torch.dtype, policy: str) -> None:
    with autocast("cpu", dtype, policy=policy):
        low = sorter(tokens)
    assert low.dtype is dtype
    torch.testing.assert_close(low.float(), sorter(tokens), atol=8 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_nothing_at_a_padded_place_is_seen_elsewhere(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    attention = SelfAttention(16, 4).to(dtype)
    x = torch.randn(2, 5, 16).to(dtype)
    present = torch.tensor([[True, True, True, False, False], [True] * 5])
    changed = torch.where(present[:, :, None], x, 100 * torch.randn(2, 5, 16).to(dtype))
    out = attention(changed, present)
    assert out.dtype is dtype
    torch.testing.assert_close(out[present], attention(x, present)[present], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_sequence_of_padding_alone_gives_numbers(dtype: torch.dtype) -> None:
    network = model().to(dtype)
    logits = network(torch.zeros(2, LENGTH, dtype=torch.int64))
    assert logits.isfinite().all()
    loss(logits.float(), torch.zeros(2, LENGTH, dtype=torch.int64)).backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in network.parameters())


def test_large_queries_and_keys_do_not_overflow_in_float16() -> None:
    attention = SelfAttention(64, 1)
    x = torch.ones(1, 3, 64)
    with torch.no_grad():
        # Queries and keys of 80: 64 products of 6400 are 409,600, beyond float16, and divided by 8 are 51,200.
        attention.to_queries_keys_values.weight.fill_(80 / 64)
        attention.to_queries_keys_values.bias.zero_()
        out = attention.half()(x.half(), torch.ones(1, 3).bool())
    assert out.isfinite().all()


def test_the_loss_leaves_padding_out() -> None:
    logits = torch.randn(2, 3, 10, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[4, NO_TARGET, NO_TARGET], [1, 2, NO_TARGET]])
    chosen = [logits[0, 0].log_softmax(0)[4], logits[1, 0].log_softmax(0)[1], logits[1, 1].log_softmax(0)[2]]
    assert loss(logits, targets).item() == pytest.approx(-torch.stack(chosen).mean().item())


def test_accuracy_counts_places_with_a_digit() -> None:
    class Right(torch.nn.Module):
        """Says each sequence in order, and 9 where there is padding."""

        def forward(self, tokens: Tensor) -> Tensor:
            in_order = torch.where(tokens == 0, 10, tokens - 1).sort(1).values.clamp_max(9)
            return torch.nn.functional.one_hot(in_order, 10).float()

    class Zero(torch.nn.Module):
        """Says 0 everywhere."""

        def forward(self, tokens: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(torch.zeros_like(tokens), 10).float()

    held_out = data()[1]
    targets = held_out.tensors[1]
    assert accuracy(Right(), held_out) == 1.0
    zeros = (targets == 0).sum() / (targets != NO_TARGET).sum()
    assert accuracy(Zero(), held_out) == pytest.approx(zeros.item())


def test_it_is_exported_with_a_dynamic_batch(sorter: Sorter, tokens: Tensor) -> None:
    half = sorter.half()
    program = torch.export.export(half, (tokens[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(program.module()(tokens), half(tokens))
