"""A model that takes too long, as the server loads it: its copy is replaced by one read from its file."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest

from serve.engine.errors import ModelLoadError
from serve.engine.tensors import Array
from tests.models import save_counter, save_mlp
from tests.serve.conftest import load_repository
from tests.serve.engine.precision_guard.asking import WAIT_S, ask_model

LONG = 10**12  # weeks


def number(n: int) -> Array:
    return np.array([n], np.int64)


def test_a_copy_that_takes_too_long_is_replaced_and_the_model_answers_again(tmp_path: Path) -> None:
    save_counter(tmp_path / "counter" / "1" / "model.onnx")
    limit = 'parameters { key: "halfserve.max_compute_s" value { string_value: "0.2" } }'
    (tmp_path / "counter" / "config.pbtxt").write_text(limit)

    async def scene() -> None:
        (model,) = load_repository(tmp_path)
        (instance,) = model.batcher.instances
        first = instance._copy.backend
        assert await ask_model(model, number(5)) == [5.0]
        assert await ask_model(model, number(LONG)) == (
            "the model did not answer within its 0.2 s and is being restarted; try again later"
        )
        ready = [model.is_ready]
        assert await ask_model(model, number(7)) == [7.0]
        assert [*ready, model.is_ready] == [False, True]
        assert (instance.restarts, instance.fault) == (1, "a batch was not computed within 0.2 s")
        assert instance._copy.backend is not first
        await model.batcher.drain()

    before = set(threading.enumerate())
    asyncio.run(scene())
    for thread in set(threading.enumerate()) - before:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "what was given up computes no further"


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "weights.bin"])
def test_a_copy_is_not_loaded_anew_from_what_has_been_changed(tmp_path: Path, name: str) -> None:
    path = save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    folder = path.parent
    (folder / "model.onnx.data").write_bytes(b"weights")
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (model,) = load_repository(tmp_path)
    assert model.reload is not None
    file = folder / name
    before, content = file.stat(), file.read_bytes()
    (folder / f"{name}.bak").write_bytes(content)
    model.reload(0)
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(
        ModelLoadError, match=f"{name}: has been changed since the model was loaded; put the file back, or load"
    ):
        model.reload(0)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    model.reload(0)
