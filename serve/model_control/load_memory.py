"""The memory that models take which load at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from halfserve.serve.backends.onnx_runtime.onnx_file import data_bytes, open_onnx
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.resource_limits import available_bytes, memory_limit_bytes

MB = 1e6
PYTHON_SUFFIX = ".py"
MakeRoom = Callable[[], Awaitable[bool]]


class LoadMemory:
    """Admits loads whose models fit into the available memory together. Lives on the event loop."""

    def __init__(self) -> None:
        self._claimed = 0  # bytes of the models that load now; what they have taken already counts twice
        self._turn = asyncio.Lock()
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def claimed(self, model: Path, needed: int, make_room: MakeRoom | None = None) -> AsyncIterator[None]:
        """Claim the `needed` bytes of a model while it loads; wait for other loads if all together need too much.

        `make_room`: unloads another model, and returns whether it did; None if models are not unloaded for others.

        Raises:
            ModelLoadError: memory does not suffice for this model alone.
        """
        async with self._turn:  # so that small models do not pass a large one forever
            while (available := self._lacking(needed)) is not None:
                limit = memory_limit_bytes()
                if make_room is not None and (limit is None or needed <= limit) and await make_room():
                    continue
                if not self._claimed:
                    raise _no_memory(model, needed, available)
                self._ended.clear()
                await self._ended.wait()
            self._claimed += needed
        try:
            yield
        finally:
            self._claimed -= needed
            self._ended.set()

    def _lacking(self, needed: int) -> int | None:
        """Return the bytes that are available if they do not suffice; None if they do, or are unknown."""
        available = available_bytes() if needed else None
        return None if available is None or needed + self._claimed <= available else available


def _no_memory(model: Path, needed: int, available: int) -> ModelLoadError:
    return ModelLoadError(
        f"{model}: not enough memory: it takes at least {needed / MB:.0f} MB, {available / MB:.0f} MB are available; "
        "unload another model, or ask for fewer copies (instance_group)"
    )


def needed_bytes(model: Path, copies: int) -> int:
    """Return the least memory that `copies` of a model take: its file and data files; 0 for code, whose need is unknown.

    A model of code may load others while it loads, and these must not wait for its memory.
    """
    return 0 if model.suffix == PYTHON_SUFFIX else _weights_bytes(model) * max(1, copies)


def _weights_bytes(model: Path) -> int:
    """Return the size of the model file, its data files, and files beside it that begin with its name (model.onnx.data)."""
    beside = {path for path in model.parent.iterdir() if path.name.startswith(model.name)}
    if model.suffix == ".xml":  # OpenVINO's weights
        beside.add(model.with_suffix(".bin"))
    locations, read = _data(model)
    named = {model.parent / name for name in locations}
    return _size(beside - named) + max(_size(named), read)


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def _data(model: Path) -> tuple[frozenset[str], int]:
    """Return the data files, and the bytes that tensors read from them: more than the files' size if several read the same
    bytes.
    """
    try:
        with open_onnx(model) as opened:
            return opened.data_files, data_bytes(opened.model, model)
    except ModelLoadError:  # or it is another kind of model; loading it reports the error
        return frozenset(), 0
