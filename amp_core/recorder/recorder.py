"""`Recorder`: records one training step in many, without changing its values."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops import utils as higher_order
from torch._ops import OpOverload
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass_type,
)

from halfserve.amp_core.autocast.policy_state import KEY as POLICY_KEY
from halfserve.amp_core.autocast.policy_state import NO_POLICIES, policies_in_force
from halfserve.amp_core.policy.operations import autocast_key, qualified_name
from halfserve.amp_core.recorder.module_spans import ModuleSpans, hooked
from halfserve.amp_core.recorder.observations import Observations, computes, dtypes_of, outputs_of
from halfserve.amp_core.recorder.record import Direction, Record, merge

_C = torch._C  # noqa: SLF001  (dispatch keys have no public face)


def run_outside_mode(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation with the autocast state that its kernel would have found without the mode.

    torch disables autocast for the calls of a dispatch mode. Most kernels do not depend on it. An operation without an autocast
    rule (a custom operation, a whole encoder layer) runs its parts under the autocast of the region around, and does so here.
    """
    if isinstance(op, OpOverload):
        device: str | None = next((value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if device is not None and _was_in_region(device) and not _has_rule(op, device):
            with _autocast_on(device):
                return op(*args, **kwargs)
    return op(*args, **kwargs)


def _was_in_region(device: str) -> bool:
    """Return whether autocast was enabled where the user's code called the operation."""
    with _C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]  # noqa: SLF001  (dispatch keys have no public face)
        return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _has_rule(op: OpOverload, device: str) -> bool:
    """Return whether autocast or a policy has a rule for the operation: its parts then run with autocast disabled."""
    rules = (rules for of, rules in policies_in_force().rules if of == device)
    return _is_listed(op, device) or any(qualified_name(op) in of_device for of_device in rules)


@cache
def _is_listed(op: OpOverload, device: str) -> bool:
    return _C._dispatch_has_kernel_for_dispatch_key(qualified_name(op), autocast_key(device))  # noqa: SLF001  (see above)


@contextmanager
def _autocast_on(device: str) -> Iterator[None]:
    included = _C._dispatch_tls_local_include_set()  # noqa: SLF001  (dispatch keys have no public face)
    excluded = _C._dispatch_tls_local_exclude_set()  # noqa: SLF001  (dispatch keys have no public face)
    excluded = excluded.remove(getattr(_C.DispatchKey, autocast_key(device)))
    if policies_in_force() is not NO_POLICIES:
        excluded = excluded.remove(POLICY_KEY)
    with _C._ForceDispatchKeyGuard(included, excluded):  # noqa: SLF001  (dispatch keys have no public face)
        yield


class _Measuring(threading.local):
    """Whether this thread is measuring an output, which other recorders must not see."""

    now = False


_measuring = _Measuring()


class RecordingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode below autograd and autocast: runs every operation unchanged, and notes its outputs."""

    supports_higher_order_operators = True

    def __init__(self, seen: Observations, spans: ModuleSpans, scale: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen, self._spans, self._scale = seen, spans, scale

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing compiled runs in a recorded step, and skipping would double the cost of a call."""
        return False

    def __torch_dispatch__(
        self, op: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _measuring.now:
            return op(*args, **kwargs)
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # torch dispatches the tensor again as its parts, which are recorded
        where = self._spans.current()
        result = run_outside_mode(op, args, kwargs)
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


WARNING = (
    "the model is compiled, and compiled code cannot be looked into: recorded steps run it uncompiled. They are slower, "
    "their results differ from compiled ones by rounding, and dropout draws other numbers"
)


def uncompiled() -> AbstractContextManager[None]:
    """Run everything that `torch.compile` returned as eager code; its compiled code stays valid for later.

    In a dispatch mode torch runs compiled functions eagerly anyway, but refuses those with `fullgraph=True`.
    """
    _keep_functions_captured()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


_lock = threading.Lock()
_is_done = False


def _keep_functions_captured() -> None:
    """Let torch still capture the functions of cond, scan and other higher-order operations, once per process.

    torch compiles them even in eager code, to find the tensors that they use: uncaptured, the gradients of weights that a
    function does not take as an argument would be lost. Such an operation is not recorded.
    """
    global _is_done  # noqa: PLW0603  (torch's module is one per process)
    with _lock:
        if not _is_done:
            # Takes torch's own function by name, and so keeps it: it is recorded.
            from torch.nn.attention import flex_attention  # noqa: F401, PLC0415  (imports torch._dynamo)

            higher_order.setup_compilation_env = _unobserved(higher_order.setup_compilation_env)
        _is_done = True


def _unobserved(capturing: Callable[[], AbstractContextManager[Any]]) -> Any:
    @contextmanager
    def unobserved() -> Iterator[Any]:
        with ExitStack() as stack:
            if any(isinstance(mode, RecordingMode) for mode in _get_current_dispatch_mode_stack()):
                stack.enter_context(_disable_current_modes())
                stack.enter_context(torch.compiler.set_stance("default"))
            yield stack.enter_context(capturing())

    return unobserved


def is_compiled(model: nn.Module) -> bool:
    """Return whether `torch.compile` was called on a model or on a module in it."""
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules())  # noqa: SLF001  (torch has no public way)


_NOT_RECORDED = nullcontext()


class Recorder:
    """Records the dtypes and ranges of all operations of a model's training, in one step of many.

    Example::

        recorder = Recorder(model, every=200)
        for step, (inputs, targets) in enumerate(batches, start=1):
            with recorder.step(step, scale=scaler.get_scale()):
                with autocast("cuda"):
                    loss = criterion(model(inputs), targets)
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        rich.print(table(recorder.record()))

    Steps 1, 1 + every, 1 + 2 * every, ... are recorded; on the others `step` does nothing. Recording changes no value: losses,
    gradients and random draws are those of an unrecorded step, unless the model is compiled (a warning says so once). No tensor
    is kept. On an accelerator nothing waits for the device before the record is asked for.

    A few of torch's composites take another path in a dispatch mode and differ in that step: `linalg.svdvals`, `eigvalsh`,
    `cond` and the nuclear norm by rounding, `bilinear` under the policy `cuda` in value, and `pinverse` in dtype (bfloat16 for
    float32).

    Not recorded: threads that the step starts itself (`DataParallel`'s replicas), ranges of tensors without values (meta, fake)
    or with a layout that hides them, integers, the functions of `torch.cond`, `scan` and other higher-order operations. Where
    forward ran on an accelerator and backward makes a graph of its own (`create_graph=True`), operations of the second backward
    may be attributed to another module.

    Args:
        model: The model itself, whose modules give the operations their places; without a wrapper for several processes.
        every: The interval in steps, at least 1.

    Raises:
        ValueError: If `every` is below 1.
    """

    def __init__(self, model: nn.Module, *, every: int = 200) -> None:
        if every < 1:
            raise ValueError(f"every is {every}; expected a number of steps from 1")
        self._model, self._every = model, every
        self._before, self._seen, self._steps = Record(), Observations(), 0
        self._is_recording = self._has_warned = False

    def step(self, step: int, *, scale: float = 1.0) -> AbstractContextManager[None]:
        """Return the context of a step's forward, loss and backward.

        Args:
            step: The step's number, from 1.
            scale: The loss scale, by which the range of the gradients is divided for the unscaled range.

        Returns:
            A context manager that records if it is this step's turn. Entered within another one of this recorder, it raises
            RuntimeError.

        Raises:
            ValueError: If `step` is below 1, or `scale` is no positive finite number.
        """
        if step < 1:
            raise ValueError(f"step is {step}; expected the number of a step, counted from 1")
        if not 0 < scale < math.inf:
            raise ValueError(f"scale is {scale}; expected what the loss is multiplied with: a positive finite number")
        return _NOT_RECORDED if (step - 1) % self._every else self._recording(float(scale))

    def record(self) -> Record:
        """Everything recorded so far; waits for the devices."""
        entries = merge((*self._before.entries, *self._seen.entries()))
        return Record(entries=entries, steps=self._before.steps + self._steps)

    def to_dict(self) -> dict[str, Any]:
        """Return the record in plain values, as `Record.from_dict` reads them; JSON and `torch.load(weights_only=True)` take
        them.
        """
        return self.record().to_dict()

    def load_dict(self, values: dict[str, Any]) -> None:
        """Continue from an earlier record, which replaces everything recorded so far.

        Args:
            values: The result of `to_dict`.

        Raises:
            ValueError: If they are no record; nothing is changed then.
        """
        self._before = Record.from_dict(values)
        self._seen, self._steps = Observations(), 0

    @contextmanager
    def _recording(self, scale: float) -> Iterator[None]:
        if self._is_recording:
            raise RuntimeError("this recorder is recording a step already; leave its step() before the next one is entered")
        self._warn_if_compiled()
        self._is_recording, self._steps = True, self._steps + 1
        try:
            spans = ModuleSpans(self._model)
            with uncompiled(), hooked(self._model, spans), RecordingMode(self._seen, spans, scale):
                yield
        finally:
            self._is_recording = False

    def _warn_if_compiled(self) -> None:
        if not self._has_warned and is_compiled(self._model):
            self._has_warned = True
            warnings.warn(WARNING, UserWarning, stacklevel=4)


class BatchRecorder:
    """Records one batch in `every`. The model may differ from batch to batch, as a trainer may create new ones.

    Attributes:
        record: Everything recorded so far; may be set, to continue an earlier one.

    Args:
        every: The interval in batches; 0 records none.

    Raises:
        ValueError: If `every` is negative.
    """

    def __init__(self, every: int) -> None:
        if every < 0:
            raise ValueError(f"record_every is {every}; expected a number of batches from 1, or 0 for no record")
        self.record = Record()
        self._every, self._batches = every, 0

    @contextmanager
    def batch(self, model: nn.Module, scale: float) -> Iterator[None]:
        """Provide the context of a batch's forward, loss and backward, for the model without a wrapper; records the
        batch if it is due.
        """
        self._batches += 1
        if not self._every or (self._batches - 1) % self._every:
            yield
            return
        recorder = Recorder(model, every=1)
        with recorder.step(1, scale=scale):
            yield
        self.record = self.record.merged(recorder.record())
