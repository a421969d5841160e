"""What sees every operation of a recorded step, below autograd and autocast: what really runs, in the dtypes it really has."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from amp_core.recorder.entry import Direction
from amp_core.recorder.module_spans import ModuleSpans
from amp_core.recorder.observations import Observations
from amp_core.recorder.operators import computes, dtypes_of, outputs_of
from amp_core.recorder.undisturbed import run


class _Measuring(threading.local):
    """Whether this thread looks at what an operation gave out: other recorders shall not see how."""

    now = False


_measuring = _Measuring()


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operation as it would have run without it, and notes what came out.

    Args:
        seen: Where to note it.
        spans: Which module is running.
        scale: What the step's loss is multiplied with.
    """

    supports_higher_order_operators = True

    def __init__(self, seen: Observations, spans: ModuleSpans, scale: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen, self._spans, self._scale = seen, spans, scale

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not needed while nothing compiled runs (see `uncompiled`), and it would double the cost of a call."""
        return False

    def __torch_dispatch__(
        self, op: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _measuring.now:
            return op(*args, **kwargs)
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # such a tensor takes itself apart, and its parts come by here
        where = self._spans.current()
        result = run(op, args, kwargs)
        if computes(op):
            _measuring.now = True
            try:
                self._note(where, op, dtypes_of((*args, *kwargs.values())), outputs_of(op, args, result))
            finally:
                _measuring.now = False
        return result

    def _note(
        self, where: tuple[str, Direction], op: Any, inputs: tuple[torch.dtype, ...], outputs: Iterable[tuple[int, Tensor]]
    ) -> None:
        for number, output in outputs:
            self._seen.add(where, op, inputs, number, output, self._scale)
