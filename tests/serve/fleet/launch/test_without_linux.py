"""Two servers and a Python model on a system without the calls and files that only Linux has: a stand-in for macOS."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.models import save_mlp
from tests.serve.backends.python.python_models import save_python_model
from tests.serve.fleet.local_processes import processes

# Python imports a module of this name in each process at its start. The limit of open files is as macOS states and refuses it.
SITECUSTOMIZE = """
import builtins, fcntl, io, os, resource

for module, names in (
    (os, ["memfd_create", "pidfd_open", "posix_fallocate", "sched_getaffinity", "sched_getscheduler", "sched_setscheduler"]),
    (fcntl, ["F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SHRINK"]),
):
    for name in names:
        delattr(module, name)


def without(module, name):
    call = getattr(module, name)

    def checked(path, *arguments, **settings):
        if str(path).startswith(("/proc", "/sys/fs", "/dev/shm")):
            raise FileNotFoundError(2, "No such file or directory", path)
        return call(path, *arguments, **settings)

    setattr(module, name, checked)


for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "stat"), (os, "listdir"), (os, "scandir")):
    without(module, name)
set_limit, get_limit = resource.setrlimit, resource.getrlimit


def setrlimit(kind, limits):
    if kind == resource.RLIMIT_NOFILE:
        assert limits[1] == resource.RLIM_INFINITY
        if limits[0] > 10_240:
            raise ValueError("current limit exceeds maximum limit")
        limits = limits[0], get_limit(kind)[1]
    set_limit(kind, limits)


def getrlimit(kind):
    soft, hard = get_limit(kind)
    return (soft, resource.RLIM_INFINITY) if kind == resource.RLIMIT_NOFILE else (soft, hard)


resource.setrlimit, resource.getrlimit = setrlimit, getrlimit
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.RLIM_INFINITY))
"""


@pytest.mark.long
def test_two_servers_and_a_python_model_answer_without_what_linux_alone_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    repository = tmp_path / "models"
    save_mlp(repository / "half/1/model.onnx")
    save_python_model(repository, "twice")
    large = np.arange(300_000, dtype=np.float32)  # more than travels through a socket where there are memory files
    with processes(repository, "--trust-python-models", "--http-port", "0") as servers:
        for client in servers.clients:
            assert client.infer("half", {"x": np.ones((2, 64), np.float16)})["y"].shape == (2, 10)
            assert np.array_equal(client.infer("twice", {"x": large})["y"], 2 * large)
        assert servers.metric("halfserve_processes") == 2
