"""Copies that cannot come back since their device computes for nobody here any more."""

from __future__ import annotations

import asyncio

import pytest

from serve.engine.backend import Backend
from serve.engine.device_faults import is_device_lost
from serve.engine.errors import ModelLoadError
from tests.serve.engine.fragile_copies import Fragile, Scene, run

STICKY = "CUDA failure 700: an illegal memory access was encountered"


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        (STICKY, True),
        ("CUDA error: operation not supported on global/shared address space", True),
        ("CUDA failure 220: uncorrectable NVLink error detected during the execution", True),
        ("CUDA failure 2: out of memory", False),
        ("CUDA failure 900: operation not permitted when stream is capturing", False),
    ],
)
def test_what_a_runtime_says_of_a_lost_device_is_known(text: str, *, is_lost: bool) -> None:
    assert is_device_lost(RuntimeError(text)) is is_lost


class Refusing:
    """Loads nothing, but raises this, so often; then a copy that works."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)

    def __call__(self) -> Backend:
        if self._errors:
            raise self._errors.pop(0)
        return Fragile()


def wrapped() -> ModelLoadError:
    error = ModelLoadError("m.onnx: cannot be loaded")
    error.__cause__ = RuntimeError(STICKY)
    return error


@pytest.mark.parametrize("error", [RuntimeError(f"{STICKY}\n in x"), wrapped()], ids=["plain", "wrapped"])
def test_it_is_told_when_a_copy_cannot_be_loaded_anew_for_the_same_reason(error: Exception) -> None:
    told: list[str] = []

    async def test() -> None:
        first = Fragile()
        first._lost = True
        scene = Scene([first], Refusing(error, error))
        scene.instances[0].on_lost_device = told.append
        assert "cannot be loaded anew" in str((await scene.ask(1))[0])
        assert told == [str(error).split("\n")[0]]
        await scene.up_again()
        assert len(told) == 2
        await scene.batcher.drain()

    run(test)


@pytest.mark.parametrize("file", ["m", "illegal memory access"])
def test_other_reasons_are_not_told(file: str) -> None:
    told: list[str] = []

    async def test() -> None:
        first = Fragile()
        first._lost = True
        scene = Scene([first], Refusing(ModelLoadError(f"/models/{file}/1/model.onnx: not found")))
        scene.instances[0].on_lost_device = told.append
        await scene.ask(1)
        await scene.up_again()
        await asyncio.sleep(0)
        await scene.batcher.drain()

    run(test)
    assert told == []
