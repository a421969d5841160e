from __future__ import annotations

import dataclasses
import resource
import sys
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from halfserve.amp_core.checkpoint import Checkpoint, CheckpointError, build_data, load_checkpoint, save_checkpoint
from tests.amp_core.training.runs import same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def pairs() -> tuple[TensorDataset, TensorDataset]:
    return TensorDataset(torch.ones(4, 2), torch.ones(4)), TensorDataset(torch.ones(2, 2), torch.ones(2))


class Numbers(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        return iter([1.0, 2.0])

    def __len__(self) -> int:
        return 2


class Endless(Dataset[float]):
    def __getitem__(self, index: int) -> float:
        return float(index)


class Unsized(Endless):
    def __len__(self) -> int:
        raise NotImplementedError("ask the database\nfor it")


TRAINING, HELD_OUT = pairs()
EMPTY = TensorDataset(torch.ones(0, 2), torch.ones(0))


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], str]:
    """How users name a factory that returns a value."""

    def name_of(value: Any) -> str:
        monkeypatch.setattr(sys.modules[__name__], "made", lambda: value, raising=False)
        return f"{__name__}:made"

    return name_of


def checkpoint(**changes: Any) -> Checkpoint:
    values: dict[str, Any] = {
        "model": f"{__name__}:linear",
        "data": f"{__name__}:pairs",
        "weights": linear().state_dict(),
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "scheduler": {"last_epoch": 3, "lr_lambdas": [None]},
        "scaler": {"scale": 65536.0},
        "policy": "cuda+fp32:sum",
        "dtype": "float16",
        "epoch": 3,
        "step": 42,
        "rng": {"cpu": torch.get_rng_state()},
        "metrics": {"loss": 0.5, "accuracy": 0.9},
        "versions": {"torch": "2"},
        "settings": {"seed": 1},
    }
    return Checkpoint(**(values | changes))


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    saved = checkpoint()
    save_checkpoint(tmp_path / "c.pt", saved)
    loaded = load_checkpoint(tmp_path / "c.pt")
    for field in dataclasses.fields(Checkpoint):
        assert same(getattr(loaded, field.name), getattr(saved, field.name)), field.name
    assert list(tmp_path.iterdir()) == [tmp_path / "c.pt"]


def test_a_checkpoint_builds_its_model_and_data_again() -> None:
    saved = checkpoint()
    model = saved.build_model()
    assert not model.training
    torch.testing.assert_close(dict(model.state_dict()), dict(saved.weights), rtol=0, atol=0)
    train, held_out = saved.build_data()
    assert (len(train), len(held_out)) == (4, 2)  # type: ignore[arg-type]


def test_what_is_new_may_be_missing_from_an_older_file(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c.pt", checkpoint(batch=3))
    content = torch.load(tmp_path / "c.pt", weights_only=True)
    for name in ("settings", "batch", "other_ranks", "record"):
        del content[name]
    torch.save(content | {"format_version": 1}, tmp_path / "c.pt")
    loaded = load_checkpoint(tmp_path / "c.pt")
    assert (loaded.settings, loaded.batch, loaded.other_ranks, loaded.record) == ({}, 0, [], {})
    assert isinstance(loaded.build_model(), nn.Module)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (linear().state_dict(), "holds no halfserve checkpoint; expected a file that `halfserve train` wrote"),
        ([1, 2], "holds no halfserve checkpoint"),
        ({"format": "halfserve.checkpoint", "format_version": 3}, "checkpoint format 3, .* reads up to 2; upgrade halfserve"),
        ({"format": "halfserve.checkpoint", "format_version": 1, "model": "a:b"}, "lacks data, dtype, epoch"),
        (linear(), "is damaged or no checkpoint; write it again with `halfserve train`"),
    ],
)
def test_foreign_files_are_refused_in_one_line(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match=message) as error:
        load_checkpoint(tmp_path / "c.pt")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (
            {"param_groups": [{"lr": 0.1, "weight_decay": np.float64(0.1)}]},
            "optimizer.param_groups.0.weight_decay, a numpy.float64",
        ),
        ({"state": {0: (1, {"values": np.zeros(3)})}}, "optimizer.state.0.1.values, a numpy.ndarray"),
        ({"schedule": lambda step: step}, "optimizer.schedule, a builtins.function"),
        ({"state": {np.int64(3): 1}}, "a key of optimizer.state, a numpy.int64"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, optimizer: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=f"^no checkpoint can hold {named}: it would not be read back; expected tensors"):
        save_checkpoint(tmp_path / "c.pt", checkpoint(optimizer=optimizer))
    assert list(tmp_path.iterdir()) == []


def test_all_that_can_be_read_back_is_written(tmp_path: Path) -> None:
    kept = {
        "a": {1, 2},
        "b": OrderedDict(x=None),
        "c": torch.Size([1]),
        "d": Counter("aa"),
        "e": torch.float16,
        "f": (1j, b"g"),
    }
    save_checkpoint(tmp_path / "c.pt", checkpoint(optimizer=kept))
    assert load_checkpoint(tmp_path / "c.pt").optimizer == kept


@given(share=st.floats(0.0, 0.999))
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    path = tmp_path_factory.mktemp("truncated") / "c.pt"
    save_checkpoint(path, checkpoint())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CheckpointError, match="is damaged or no checkpoint"):
        load_checkpoint(path)


def test_a_file_that_calls_what_it_may_with_nonsense_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.pt").write_bytes(b"\x80\x02ccollections\nOrderedDict\nK\x05\x85R.")  # OrderedDict(5)
    with pytest.raises(CheckpointError, match="is damaged or no checkpoint"):
        load_checkpoint(tmp_path / "c.pt")


def test_a_file_that_the_system_does_not_open_now_is_not_called_damaged(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c.pt", checkpoint())
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    try:
        with pytest.raises(CheckpointError, match=r"^cannot read the checkpoint .*c\.pt: Too many open files$"):
            load_checkpoint(tmp_path / "c.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    with pytest.raises(CheckpointError, match=r"^cannot read the checkpoint .*: File name too long$"):
        load_checkpoint(tmp_path / ("c" * 300))


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint at .*; `halfserve train` writes one"):
        load_checkpoint(tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match=r"is a folder; expected the file in it, such as .*checkpoint.pt"):
        load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="cannot write the checkpoint .*: No such file or directory"):
        save_checkpoint(tmp_path / "nowhere" / "c.pt", checkpoint())


@pytest.mark.parametrize("room_bytes", [0, 64, 30_000, 1_000_000])
def test_a_full_disk_is_one_line_wherever_it_ends(tmp_path: Path, room_bytes: int) -> None:
    save_checkpoint(tmp_path / "c.pt", checkpoint(step=1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = checkpoint(weights={"first": torch.ones(100_000), "second": torch.ones(200_000)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        with pytest.raises(CheckpointError, match="^cannot write the checkpoint .*c.pt: File too large$"):
            save_checkpoint(tmp_path / "c.pt", large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]
    assert load_checkpoint(tmp_path / "c.pt").step == 1


def test_a_model_that_the_weights_do_not_fit(named: Callable[[Any], str]) -> None:
    wider = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    with pytest.raises(
        CheckpointError, match="the weights do not fit the model that '.*:made' builds: size mismatch for 0.weight"
    ) as error:
        checkpoint(model=named(wider)).build_model()
    assert "\n" not in str(error.value)
    with pytest.raises(CheckpointError, match="returned a int; expected a torch.nn.Module"):
        checkpoint(model=named(3)).build_model()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (TRAINING, "returned a TensorDataset; expected a pair of torch data sets"),
        (([1.0], HELD_OUT), r"returned a tuple of \(list, TensorDataset\); expected a pair of torch data sets"),
        (3, "returned a int; expected a pair of torch data sets"),
        (
            (TRAINING, HELD_OUT, HELD_OUT),
            "returned a tuple of .TensorDataset, TensorDataset, TensorDataset.; expected a pair",
        ),
        ((EMPTY, HELD_OUT), "the training set that '.*' returned has no items"),
        ((TRAINING, EMPTY), "the held-out set that '.*' returned has no items; expected at least one"),
        (
            (Endless(), HELD_OUT),
            "the training set that '.*' returned has no length; expected a data set with __len__, or an I",
        ),
        (
            (Unsized(), HELD_OUT),
            "returned does not say its length: len\\(\\) raised NotImplementedError: ask the database$",
        ),
        ((TRAINING, Endless()), "the held-out set that '.*' returned has no length; expected a data set with __len__$"),
        ((TRAINING, Numbers()), "the held-out set .* is an IterableDataset; expected one with a length, whose items can be"),
    ],
)
def test_data_that_is_no_pair_of_data_sets(named: Callable[[Any], str], returned: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_data(named(returned))


def test_streams_can_be_trained_on_and_where_allowed_evaluated_on(named: Callable[[Any], str]) -> None:
    streamed = named((Numbers(), HELD_OUT))
    assert isinstance(build_data(streamed)[0], Numbers)
    assert isinstance(checkpoint(data=streamed).build_data()[0], Numbers)
    assert isinstance(build_data(named((TRAINING, Numbers())), held_out_indexable=False)[1], Numbers)
