from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.models import save_mlp, save_picky
from tests.serve.fleet.local_cluster import LocalCluster, local_cluster
from tests.serve.fleet.local_processes import Processes, processes


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """For all members of a cluster. Its path is short: it has room for the name of a Unix socket."""
    with TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="session")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the models "mlp" and "picky". Its name is its own: `server` of tests/serve takes `repository`."""
    made = tmp_path_factory.mktemp("repository")
    save_mlp(made / "mlp" / "1" / "model.onnx")
    save_picky(made / "picky" / "1" / "model.onnx")
    return made


@pytest.fixture(scope="session")
def two_processes(two_models: Path) -> Iterator[Processes]:
    """Two processes that serve the repository; tests leave them and its models as they were."""
    options = ("--model-control", "explicit", "--load-model", "mlp", "--load-model", "picky")
    with processes(two_models, *options, "--shared-memory", "--warm-up-seconds", "0") as found:
        yield found


@pytest.fixture(scope="session")
def cluster(two_models: Path) -> Iterator[LocalCluster]:
    """Two members of a cluster that serve the repository; tests leave them and its models as they were."""
    with TemporaryDirectory() as name, local_cluster(Path(name), two_models) as made:
        made.start(2)
        yield made
