"""`autocast`: mixed precision for a block or a function, on torch's own mechanism, without its defects."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, cast, overload

import torch

from halfserve.amp_core.autocast.policy_kernels import EXPORT_REFUSAL
from halfserve.amp_core.autocast.policy_state import policies_in_force, untraced
from halfserve.amp_core.autocast.region import (
    AutocastRegion,
    enter,
    leave,
    may_have_a_policy,
    prepare,
    prepare_torch,
    traced_region,
)
from halfserve.amp_core.policy import Policy
from halfserve.amp_core.policy.operations import has_autocast

Function = TypeVar("Function", bound="Callable[..., Any]")


class autocast(AutocastRegion):  # noqa: N801  (torch's name)
    """Run operations of a block or function in float16 or bfloat16 where that is safe, in float32 where it is not.

    Context manager and decorator, with torch.autocast's meaning: wrap the forward pass and the loss only; backward runs each
    operation in its forward's dtype. One instance may be entered many times, recursively and from many threads. A decorated
    generator or coroutine is in the region while it runs and leaves it while it waits.

    Example:
        with autocast("cuda", torch.float16, policy="cuda+fp32:einsum"):
            loss = loss_function(model(inputs), targets)

    Regions work inside functions that torch.compile compiles, and around them. For one graph (`fullgraph=True`) make the region
    in the function, with a policy made outside or its string form: an instance made outside breaks the graph, which
    torch.autocast's does not. torch.export takes regions without a policy of their own.

    Args:
        device_type: `cuda`, `cpu`, ...; by default the accelerator in use, else the CPU.
        dtype: float16 or bfloat16; by default the dtype in force, at first torch's default for the device.
        enabled: False runs operations in the dtypes of their inputs, for an inner region that needs float32.
        cache_enabled: Whether to keep a weight's low-precision copy until the outermost region ends; by default as in the
            region around. Optimizer steps and `copy_` may change weights inside a region; after other changes, such as an
            assignment to `.data`, call `torch.clear_autocast_cache()`.
        policy: A `Policy` or its string form; by default that of the region around.

    Raises:
        TypeError: If `enabled` or `cache_enabled` is not a bool.
        ValueError: If `device_type` is not the name of a device type, or `dtype` not a low-precision one.
        RuntimeError: If the device type has no autocast, or a policy meets torch.export.
        PolicyError: If `policy` is neither a policy nor a string form that can be read.
    """

    def __new__(
        cls,
        device_type: str | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        policy: Policy | str | None = None,
    ) -> Any:
        """Make a region of this class, or under a tracer a region that the tracer understands."""
        exporting = _is_exporting()
        if not torch.compiler.is_dynamo_compiling() and not exporting:
            return super().__new__(cls)
        kind = _device_type(device_type)
        prepare_torch(kind)  # the traced region is torch's, and so would its defects be
        takes_policies = not exporting and may_have_a_policy()
        if policy is None:
            return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
        if not takes_policies:
            if str(policy) != "native":
                raise RuntimeError(EXPORT_REFUSAL)
            return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
        prepare()
        return traced_region(kind, dtype, enabled, cache_enabled, str(policy))

    @untraced
    def __init__(
        self,
        device_type: str | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        policy: Policy | str | None = None,
    ) -> None:
        if type(enabled) is not bool or type(cache_enabled) not in _FLAG_OR_NONE:
            _refuse(enabled=enabled, cache_enabled=cache_enabled)
        if device_type is None or (device_type, dtype, enabled) not in _CAN_DO:
            device_type = _device_type(device_type)
            enabled = _checked(device_type, dtype, enabled)
        # Assigned directly: the cost of entering a region shows in small steps.
        self.device_type = device_type
        self.dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        self.enabled = enabled
        self.cache_enabled = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
        self.policy = policy if policy is None else Policy.of(policy)

    def __enter__(self) -> Self:
        enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        leave(self)

    def __call__(self, function: Function) -> Function:
        """Decorate a function, method, generator or coroutine function: each call runs in a region of its own.

        Raises:
            TypeError: If it is not a function.
        """

        def make_region() -> autocast:
            made: autocast = autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled, self.policy)
            return made

        decorated: object = function
        if not callable(decorated) and not isinstance(decorated, classmethod):
            raise TypeError(
                f"autocast(...) decorates a function, got a {type(function).__name__}; for a block: with autocast(...):"
            )
        return decorate(function, make_region)


def _device_type(device_type: str | None) -> str:
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return "cpu" if accelerator is None else accelerator.type
    if not isinstance(device_type, str) or ":" in device_type:
        raise ValueError(f"device_type must be the name of a kind of device, such as 'cuda' or 'cpu'; got {device_type!r}")
    return device_type


# Arguments that torch has accepted: (device type, dtype, enabled).
_CAN_DO: set[tuple[str, torch.dtype | None, bool]] = set()


def _checked(device_type: str, dtype: torch.dtype | None, enabled: bool) -> bool:
    _check_device_type(device_type)
    _check_dtype(dtype, enabled)
    # torch knows the capabilities of a device, custom backends included; for an unsupported one it warns and disables autocast.
    possible: bool = torch.autocast(device_type, dtype=dtype, enabled=enabled)._enabled  # noqa: SLF001  (told nowhere else)
    if possible == enabled:
        _CAN_DO.add((device_type, dtype, enabled))
    return possible


def _check_dtype(dtype: object, enabled: bool) -> None:
    if dtype is None or dtype in {torch.float16, torch.bfloat16} or (isinstance(dtype, torch.dtype) and not enabled):
        return
    raise ValueError(f"dtype must be torch.float16 or torch.bfloat16, got {dtype!r}; for float32: autocast(enabled=False)")


_FLAG_OR_NONE = (bool, type(None))


def _refuse(**flags: object) -> None:
    # torch would raise while the region is half entered.
    name, value = next((name, value) for name, value in flags.items() if type(value) is not bool)
    raise TypeError(f"{name} must be True or False, got {value!r}")


def _check_device_type(device_type: str) -> None:
    if not has_autocast(device_type):
        raise RuntimeError(f"torch has no autocast for the device type {device_type!r}; expected one such as 'cuda' or 'cpu'")


def _is_exporting() -> bool:
    # torch.export without Dynamo runs Python under a mode that records torch.autocast's own enter and exit.
    if not torch._C._is_torch_function_mode_enabled():  # noqa: SLF001  (torch.autocast asks the same)
        return False
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    stack = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # noqa: SLF001  (see above)
    return tracer is not None and any(isinstance(mode, tracer.PreDispatchTorchFunctionMode) for mode in stack)


MakeRegion = Callable[[], AbstractContextManager[Any]]


def decorate(function: Function, make_region: MakeRegion) -> Function:
    """Wrap a function, method, generator, coroutine or asynchronous generator function in regions.

    A suspended generator or coroutine must leave its region, as the thread runs other code meanwhile: `make_region` makes a new
    one for each stretch of code between two suspensions.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return cast("Function", type(function)(decorate(function.__func__, make_region)))
    if inspect.isasyncgenfunction(function):
        wrapper: Any = _asynchronous_generator(function, make_region)
    elif inspect.iscoroutinefunction(function):
        wrapper = _coroutine(function, make_region)
    elif inspect.isgeneratorfunction(function):
        wrapper = _generator(function, make_region)
    else:
        wrapper = _plain(function, make_region)
    return cast("Function", functools.wraps(function)(wrapper))


def _plain(function: Callable[..., Any], make_region: MakeRegion) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with make_region():
            return function(*args, **kwargs)

    return wrapper


def _generator(function: Callable[..., Generator[Any, Any, Any]], make_region: MakeRegion) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return (yield from _drive(function(*args, **kwargs), make_region))

    return wrapper


def _coroutine(function: Callable[..., Coroutine[Any, Any, Any]], make_region: MakeRegion) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await _await_in_regions(function(*args, **kwargs), make_region)

    return wrapper


def _asynchronous_generator(function: Callable[..., AsyncGenerator[Any, Any]], make_region: MakeRegion) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        generator = function(*args, **kwargs)
        resume = generator.asend(None)
        try:
            while True:
                item = await _await_in_regions(resume, make_region)
                try:
                    resume = generator.asend((yield item))
                except GeneratorExit:
                    raise
                except BaseException as error:  # noqa: BLE001  (the generator handles anything thrown in)
                    resume = generator.athrow(error)
        except StopAsyncIteration:
            return
        finally:
            await _await_in_regions(generator.aclose(), make_region)

    return wrapper


@types.coroutine
def _await_in_regions(awaitable: Any, make_region: MakeRegion) -> Generator[Any, Any, Any]:
    return (yield from _drive(awaitable, make_region))


def _drive(generator: Any, make_region: MakeRegion) -> Generator[Any, Any, Any]:
    resume, argument = generator.send, None
    while True:
        try:
            with make_region():
                item = resume(argument)
        except StopIteration as stop:
            return stop.value
        try:
            resume, argument = generator.send, (yield item)
        except GeneratorExit:
            with make_region():
                generator.close()
            raise
        except BaseException as error:  # noqa: BLE001  (the generator handles anything thrown in)
            resume, argument = generator.throw, error


class _Decorator(Protocol):
    def __call__(self, function: Function, /) -> Function: ...


# Our attribute on the context object, beside those of torch's own custom_fwd.
_POLICY = "_halfserve_policy"


@overload
def custom_fwd(forward: None = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> _Decorator: ...
@overload
def custom_fwd(forward: Function, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Function: ...
def custom_fwd(forward: Any = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorate `forward` of a `torch.autograd.Function`; see `torch.amp.custom_fwd`, whose meaning this keeps.

    Args:
        forward: The static method; leave it out to use this with arguments above a `def`.
        device_type: The device whose autocast matters.
        cast_inputs: In an enabled region, cast floating inputs to this dtype and run `forward` with autocast disabled.

    Raises:
        ValueError: If `device_type` is not a string.
    """
    if forward is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    by_torch = torch.amp.custom_fwd(forward, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(forward)
    def wrapper(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(ctx, _POLICY, policies_in_force().of(device_type))
        return by_torch(ctx, *args, **kwargs)

    return wrapper


@overload
def custom_bwd(backward: None = None, *, device_type: str) -> _Decorator: ...
@overload
def custom_bwd(backward: Function, *, device_type: str) -> Function: ...
def custom_bwd(backward: Any = None, *, device_type: str) -> Any:
    """Decorate `backward` of a `torch.autograd.Function` whose `forward` has `custom_fwd`.

    Backward then runs with forward's dtype, its being enabled or not, and its policy, also in another thread.

    Raises:
        RuntimeError: When backward runs, if forward has no `custom_fwd`.
    """
    if backward is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(backward)
    def wrapper(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(ctx, "_fwd_used_autocast"):
            raise RuntimeError("a backward with custom_bwd needs custom_fwd on its forward(ctx, ...), which notes its autocast")
        enabled, dtype = ctx._fwd_used_autocast, ctx._dtype  # noqa: SLF001  (torch's custom_fwd puts them there)
        # torch's custom_fwd saves no policy: its regions have none.
        with autocast(device_type, dtype=dtype, enabled=enabled, policy=getattr(ctx, _POLICY, Policy())):
            return backward(ctx, *args, **kwargs)

    return wrapper
