"""The transformer example: its data, its forward pass in every dtype, its training and its export."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

from halfserve import autocast, cli
from halfserve.amp_core.checkpoint import load_checkpoint
from halfserve.examples.transformer import __main__ as command
from halfserve.examples.transformer.data import LENGTH, NO_TARGET, PADDING, SHORTEST, accuracy, ascending, data, loss
from halfserve.examples.transformer.model import SelfAttention, Sorter, model
from tests.examples.running import run_example

pytestmark = pytest.mark.long


def test_the_data_is_always_the_same_and_the_parts_differ() -> None:
    parts, again = data(), data()
    for one, other in zip(parts, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))
    assert [len(part) for part in parts] == [2048, 512]
    assert not torch.equal(parts[0].tensors[0][:512], parts[1].tensors[0])


def test_every_target_is_its_sequence_in_order() -> None:
    for part in data():
        tokens, targets = part.tensors
        assert (tokens.shape, targets.shape) == ((len(part), LENGTH),) * 2
        lengths = set()
        for sequence, target in zip(tokens.tolist(), targets.tolist(), strict=True):
            digits = [token - 1 for token in sequence if token != PADDING]
            padding = LENGTH - len(digits)
            assert sequence[len(digits) :] == [PADDING] * padding
            assert target == sorted(digits) + [NO_TARGET] * padding
            lengths.add(len(digits))
        assert lengths == set(range(SHORTEST, LENGTH + 1))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.data())
def test_what_is_absent_is_sorted_behind(digits: list[int], draw: st.DataObject) -> None:
    present = draw.draw(st.lists(st.booleans(), min_size=len(digits), max_size=len(digits)))
    kept = sorted(digit for digit, here in zip(digits, present, strict=True) if here)
    result = ascending(torch.tensor([digits]), torch.tensor([present]))[0].tolist()
    assert result == kept + [NO_TARGET] * (len(digits) - len(kept))


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


Runs = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What the command wrote and printed."""
    folder = tmp_path_factory.mktemp("transformer")
    options = ["--epochs", "3", "--device", "cpu", "--out", str(folder), "--json"]
    done = CliRunner().invoke(command.app, options)
    assert done.exit_code == 0, done.output
    return folder, json.loads(done.stdout)["dtypes"]


@pytest.mark.long
def test_it_learns_in_every_precision(runs: Runs) -> None:
    targets = data()[1].tensors[1]
    present = targets != NO_TARGET
    # The best without looking at the digits: the commonest one at each place.
    blind = sum(int(targets[:, place][present[:, place]].bincount().max()) for place in range(targets.shape[1]))
    for dtype, figures in runs[1].items():
        assert figures["accuracy"] > 2 * blind / int(present.sum()), dtype
        assert figures["accuracy"] > 0.8, dtype
        assert figures["evaluation_loss"] < 0.3 * math.log(10), dtype


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision_is_as_good_as_float32(runs: Runs, dtype: str) -> None:
    low, full = runs[1][dtype], runs[1]["float32"]
    assert low["accuracy"] == pytest.approx(full["accuracy"], abs=0.01)
    assert low["evaluation_loss"] == pytest.approx(full["evaluation_loss"], rel=0.02)
    assert low["evaluation_loss"] != full["evaluation_loss"]
    assert low["steps"] == full["steps"] == 3 * 32
    assert low["skipped_steps"] <= 2


@pytest.mark.long
def test_accumulated_batches_make_nearly_the_same_steps(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "DTYPES", ("bfloat16",))
    options = ["--epochs", "3", "--accumulate", "2", "--device", "cpu", "--out", str(tmp_path), "--json"]
    done = CliRunner().invoke(command.app, options)
    assert done.exit_code == 0, done.output
    low, whole = json.loads(done.stdout)["dtypes"]["bfloat16"], runs[1]["bfloat16"]
    assert low["steps"] == whole["steps"]
    # Not the same: the mean of two batches' means is not the mean over all places, where sequences differ in length.
    assert low["accuracy"] == pytest.approx(whole["accuracy"], abs=0.03)
    assert load_checkpoint(low["checkpoint"]).settings["accumulate"] == 2


@pytest.mark.long
def test_the_checkpoint_says_how_it_was_trained(runs: Runs) -> None:
    for dtype, figures in runs[1].items():
        assert (runs[0] / dtype / "train.jsonl").is_file()
        checkpoint = load_checkpoint(figures["checkpoint"])
        assert (checkpoint.dtype, checkpoint.policy) == (dtype, "cuda")
        assert checkpoint.settings["loss"] == "halfserve.examples.transformer.data:loss"


@pytest.mark.long
def test_it_is_exported_to_fp16_with_proof(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "export",
        runs[1]["float16"]["checkpoint"],
        "--repository",
        str(tmp_path),
        "--name",
        "sorter",
        "--max-samples",
        "64",
        "--json",
    ]
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert not end.value.code
    version = Path(json.loads(capsys.readouterr().out)["path"])
    assert json.loads((version / "certificate.json").read_text())["passed"] is True
    assert (version / "model.onnx").stat().st_size > 0


@pytest.mark.long
def test_a_wrong_policy_ends_it_with_the_commands_line_and_code(tmp_path: Path) -> None:
    done = run_example("transformer", "--policy", "cudda", "--json", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("halfserve train: unknown policy 'cudda'")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("batches", [3, 40, 63])
def test_a_step_is_64_sequences_or_none(batches: int) -> None:
    result = CliRunner().invoke(command.app, ["--accumulate", str(batches)])
    assert result.exit_code == 2
    assert f"64 sequences cannot be cut into {batches} batches of one size" in result.output
