"""`autocast`: mixed precision for a block or a function, on torch's own mechanism, without its defects."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from amp_core.casting.decoration import decorate
from amp_core.casting.policy_kernel import EXPORT_REFUSAL
from amp_core.casting.region import Region, enter, leave, prepare_torch
from amp_core.casting.traced_region import may_have_a_policy, prepare, traced_region
from amp_core.casting.untraced import untraced
from amp_core.policy import Policy, PolicyError
from amp_core.policy.native_rules import has_autocast

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

Function = TypeVar("Function", bound="Callable[..., Any]")


class autocast(Region):  # noqa: N801  (torch's name)
    """Run operations of a block or function in float16 or bfloat16 where that is safe, in float32 where it is not.

    Context manager and decorator, with torch.autocast's meaning: wrap the forward pass and the loss only; backward runs each
    operation in its forward's dtype. One instance may be entered many times, recursively and from many threads; a decorated
    generator or coroutine is in the region whenever it runs and out of it whenever it waits.

    Example:
        with autocast("cuda", torch.float16, policy="cuda+fp32:einsum"):
            loss = loss_function(model(inputs), targets)

    Regions may be inside of functions that torch.compile compiles, and around them. For one graph (`fullgraph=True`) make the
    region in the function, with a policy made outside or its string form: an instance made outside breaks the graph, which
    torch.autocast's does not. torch.export takes regions without a policy of their own.

    Args:
        device_type: `cuda`, `cpu`, ...; by default the accelerator in use, else the CPU.
        dtype: float16 or bfloat16; by default the one in force, which at first is torch's default for the device.
        enabled: False runs operations in the dtypes they are given, for an inner region that needs float32.
        cache_enabled: Whether to keep a weight's low-precision copy until the outermost region ends; by default as around.
            Weights may change inside a region by an optimizer's step or `copy_`; after other changes, such as an assignment
            to `.data`, call `torch.clear_autocast_cache()`.
        policy: A `Policy` or its string form; by default that of the region around.

    Raises:
        TypeError: If `enabled` or `cache_enabled` is not a bool.
        ValueError: If `device_type` is not the name of a device type, or `dtype` not a low-precision one.
        RuntimeError: If the device type has no autocast, or a policy meets torch.export.
        PolicyError: If the policy is none, or its string form cannot be read.
    """

    def __new__(
        cls,
        device_type: str | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        policy: Policy | str | None = None,
    ) -> Any:
        """Make a region of our own, or where a graph is being traced one that its tracer understands."""
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
        # Not through Region's constructor, nor by a region of its own: entering is what a small step feels.
        self.device_type = device_type
        self.dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        self.enabled = enabled
        self.cache_enabled = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
        self.policy = policy if policy is None else _checked_policy(policy)

    def __enter__(self) -> Self:
        enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        leave(self)

    def __call__(self, function: Function) -> Function:
        """Decorate a function, method, generator or coroutine function: each call runs in a region of its own.

        Raises:
            TypeError: If it is no function.
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


# What torch has agreed to: (device type, dtype, enabled).
_CAN_DO: set[tuple[str, torch.dtype | None, bool]] = set()


def _checked(device_type: str, dtype: torch.dtype | None, enabled: bool) -> bool:
    _check_device_type(device_type)
    _check_dtype(dtype, enabled)
    # torch knows what a device can do, custom backends included; where it cannot, it warns and switches autocast off.
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
    # torch would find out while the region is entered, when half of it is done.
    name, value = next((name, value) for name, value in flags.items() if type(value) is not bool)
    raise TypeError(f"{name} must be True or False, got {value!r}")


def _checked_policy(policy: Policy | str) -> Policy:
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return Policy.parse(policy)
    raise PolicyError(f"policy must be a Policy or its string form, such as 'cuda+fp32:einsum'; got {policy!r}")


def _check_device_type(device_type: str) -> None:
    if not has_autocast(device_type):
        raise RuntimeError(f"torch has no autocast for the device type {device_type!r}; expected one such as 'cuda' or 'cpu'")


def _is_exporting() -> bool:
    # torch.export without Dynamo runs plain Python under a mode that records torch.autocast's own enter and exit.
    if not torch._C._is_torch_function_mode_enabled():  # noqa: SLF001  (torch.autocast asks the same)
        return False
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")
    stack = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # noqa: SLF001  (see above)
    return tracer is not None and any(isinstance(mode, tracer.PreDispatchTorchFunctionMode) for mode in stack)
