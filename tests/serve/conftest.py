from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import pytest

from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import DevicePlacement, Runtime
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.model_loading import load_model
from halfserve.serve.engine.repository.model_repository import find_models
from tests.models import save_echo_types, save_mlp, save_picky, save_unbatched
from tests.serve.running_server import WAIT_S, RunningServer, running_server
from tests.serve.runtimes import RUNTIMES


@runtime_checkable
class Drained(Protocol):
    async def drain(self) -> None: ...


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test on an event loop of its own, and drain its fixtures there."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def main() -> None:
        await asyncio.wait_for(pyfuncitem.obj(**given), WAIT_S)
        for fixture in given.values():
            if isinstance(fixture, Drained):
                await asyncio.wait_for(fixture.drain(), WAIT_S)

    asyncio.run(main())
    return True


def load_repository(repository: Path, runtime: Runtime | None = None) -> list[Model]:
    placement = DevicePlacement(use_gpu=False, threads=1)
    return [load_model(files, runtime or OnnxRuntime(), placement, Defaults()) for files in find_models(repository)]


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> Runtime:
    """Each runtime that computes ONNX files on the CPU."""
    return RUNTIMES[request.param]()


def vouched(models: list[Model]) -> list[Model]:
    """The models as they are after the check that their certificates belong to them."""
    for model in models:
        model.config.parameters["halfserve.certificate"].string_value = "passed"
    return models


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models "mlp" (versions 1 and 3, both served), "echo_types", "picky" and "unbatched"."""
    root = tmp_path_factory.mktemp("repository")
    for version in (1, 3):
        save_mlp(root / "mlp" / str(version) / "model.onnx")
    labelled = 'output { name: "y" data_type: TYPE_FP16 dims: 10 label_filename: "digits.txt" }'
    (root / "mlp" / "config.pbtxt").write_text(f"max_batch_size: 16 version_policy {{ all {{}} }} {labelled}")
    (root / "mlp" / "digits.txt").write_text("zero\none\ntwo\nthree\nfour\nfive\nsix\nseven\neight\nnine\n")
    save_echo_types(root / "echo_types" / "1" / "model.onnx")
    save_picky(root / "picky" / "1" / "model.onnx")
    save_unbatched(root / "unbatched" / "1" / "model.onnx")
    return root


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[RunningServer]:
    """A real server on `repository`, at `server.address`."""
    with running_server(lambda: load_repository(repository)) as running:
        yield running


@pytest.fixture(scope="session")
def sharing(repository: Path) -> Iterator[RunningServer]:
    """A server that takes shared memory."""
    with running_server(lambda: load_repository(repository), shared_memory=True) as running:
        yield running


@pytest.fixture
def log_settings_of_one_test() -> Iterator[None]:
    """Remove what a server of many tests applied to the handlers of Python's logging, which are pytest's own."""
    before = {handler: list(handler.filters) for handler in logging.getLogger().handlers}
    yield
    for handler, filters in before.items():
        handler.filters[:] = filters
