"""The fp32 model that an fp16 one was made from, for answers where fp16 fails and to compare with."""

from __future__ import annotations

import threading
from collections.abc import Callable

from serve.engine.backend import Backend
from serve.engine.tensors import Tensors

Load = Callable[[], Backend]


class Fp32Twin:
    """Answers in fp32. Threads take turns; whoever asks first loads it."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._backend: Backend | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Load it now, unless it is there.

        Raises:
            ModelLoadError: it cannot be loaded.
        """
        with self._lock:
            self._loaded()

    def answer(self, inputs: Tensors) -> Tensors:
        """Every output, in the twin's own dtypes.

        Args:
            inputs: by name, in whatever width the fp16 model computed in.

        Raises:
            ModelLoadError: it cannot be loaded.
            Exception: whatever the runtime raises.
        """
        with self._lock:
            backend = self._loaded()
            return backend.run({name: array.astype(backend.compute_dtype(name), copy=False) for name, array in inputs.items()})

    def _loaded(self) -> Backend:
        if self._backend is None:
            self._backend = self._load()
        return self._backend
