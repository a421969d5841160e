"""One server on several repositories: a model is served from the one that has it, and from none where two have it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.model_control.control_options import ControlMode
from tests.models import save_mlp
from tests.serve.ensemble_folders import CHAIN, save_add, save_ensemble
from tests.serve.model_control.controlled import ask, controlled_server, lines, wait_for

TWICE = "model 'mlp' is in 2 model repositories (a, b), expected it in one; remove or rename the others"
MLP_1, MLP_2 = ("mlp", "1", "READY", ""), ("mlp", "2", "READY", "")
OTHER = ("other", "1", "READY", "")


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """`a` with `mlp` of version 1, `b` with `other`."""
    save_mlp(tmp_path / "a" / "mlp" / "1" / "model.onnx")
    save_mlp(tmp_path / "b" / "other" / "1" / "model.onnx")
    return tmp_path / "a", tmp_path / "b"


def duplicate(folder: Path) -> None:
    """Add version 2 of `mlp` to a repository, at once."""
    save_mlp(folder / ".mlp" / "2" / "model.onnx")
    (folder / ".mlp").rename(folder / "mlp")


def test_all_repositories_are_listed_and_loaded_from(roots: tuple[Path, Path]) -> None:
    a, b = roots
    with (
        controlled_server(a, ControlMode.EXPLICIT, more_paths=(b,)) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        assert [name for name, *_ in lines(server)] == ["mlp", "other"]
        for name in ("mlp", "other"):
            client.load_model(name)
            ask(client, name)
        client.load_model("other", config='{"max_batch_size": 3}')
        assert client.get_model_config("other").config.max_batch_size == 3
        client.unload_model("other")
        assert lines(server) == [MLP_1, ("other", "1", "UNAVAILABLE", "unloaded")]


def test_an_ensemble_finds_its_steps_in_another_repository(tmp_path: Path) -> None:
    save_ensemble(tmp_path / "a" / "pipe", CHAIN)
    save_add(tmp_path / "b" / "one", 1)
    save_add(tmp_path / "b" / "ten", 10)
    with (
        controlled_server(tmp_path / "a", ControlMode.EXPLICIT, more_paths=(tmp_path / "b",)) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        client.load_model("pipe")
        assert [(name, state) for name, _, state, _ in lines(server)] == [(n, "READY") for n in ("one", "pipe", "ten")]


def test_a_bare_file_is_served_beside_a_repository(roots: tuple[Path, Path], tmp_path: Path) -> None:
    bare = save_mlp(tmp_path / "net.onnx")
    with controlled_server(roots[0], ControlMode.NONE, more_paths=(bare,)) as server:
        assert lines(server) == [MLP_1, ("net", "1", "READY", "")]


def test_a_name_in_two_repositories_is_refused_while_the_loaded_one_serves(roots: tuple[Path, Path]) -> None:
    a, b = roots
    with (
        controlled_server(a, ControlMode.EXPLICIT, load_at_start=("*",), more_paths=(b,)) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        duplicate(b)
        with pytest.raises(InferenceServerException, match=r"model 'mlp' was refused: .*is in 2 model repositories"):
            client.load_model("mlp")
        kept = "serves as it was loaded before; what is there now was refused: "
        assert lines(server) == [("mlp", "1", "READY", kept + TWICE), OTHER]
        ask(client)
        shutil.rmtree(a / "mlp")
        client.load_model("mlp")
        assert lines(server) == [("mlp", "1", "UNAVAILABLE", "unloaded"), MLP_2, OTHER]


def test_a_name_in_two_repositories_stops_the_start(roots: tuple[Path, Path]) -> None:
    a, b = roots
    duplicate(b)
    with (
        pytest.raises(ModelLoadError, match="is in 2 model repositories"),
        controlled_server(a, ControlMode.NONE, more_paths=(b,)),
    ):
        pass
    with controlled_server(a, ControlMode.NONE, more_paths=(b,), keep_going=True) as server:
        assert lines(server) == [("mlp", "", "UNAVAILABLE", TWICE), OTHER]


def test_polling_unloads_a_name_in_two_repositories_until_one_is_removed(roots: tuple[Path, Path]) -> None:
    a, b = roots
    with controlled_server(a, ControlMode.POLL, more_paths=(b,), poll_interval_s=0.01, settle_s=0.01) as server:
        assert lines(server) == [MLP_1, OTHER]
        duplicate(b)
        wait_for(server, [("mlp", "", "UNAVAILABLE", TWICE), ("mlp", "1", "UNAVAILABLE", "unloaded"), OTHER])
        shutil.rmtree(a / "mlp")
        wait_for(server, [MLP_2, OTHER])


def test_polling_follows_a_model_that_moves_to_another_repository(roots: tuple[Path, Path]) -> None:
    a, b = roots
    with controlled_server(a, ControlMode.POLL, more_paths=(b,), poll_interval_s=0.01, settle_s=0.01) as server:
        (a / "mlp").rename(b / "mlp")

        async def moved() -> None:
            while [model.path for model in server.core.served("mlp")] != [b / "mlp" / "1" / "model.onnx"]:
                await server.core.changed.wait()

        server.run(moved())
