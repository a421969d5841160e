"""The operations that autocast knows: their names, their overloads, and torch's own rule for each."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from enum import StrEnum
from functools import cache

import torch
from torch._ops import OpOverload


class Rule(StrEnum):
    """The rules for an operation's floating inputs (float64 inputs and those on other devices are never cast)."""

    LOW = "low"  # cast to the region's dtype
    FP32 = "fp32"  # cast to float32
    WIDEST = "widest"  # cast to the widest dtype among them
    NATIVE = "native"  # torch's own behaviour on the device
    BAN = "ban"  # raise: the operation cannot be made safe


# Names are aten's (`torch.ops.aten`), except the keys of `ALIASES`, which are public names that differ. Source: torch's
# documentation of automatic mixed precision ("CUDA Op-Specific Behavior") and the registrations of torch 2.13.


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ALIASES: dict[str, tuple[str, ...]] = {
    "__matmul__": ("matmul",),
    "__pow__": ("pow",),
    "__rpow__": ("pow",),
    "__rdiv__": ("reciprocal",),
    "__rtruediv__": ("reciprocal",),
    "BCELoss": ("binary_cross_entropy",),
    "GRUCell": ("gru_cell", "_thnn_fused_gru_cell"),
    "LSTMCell": ("lstm_cell", "_thnn_fused_lstm_cell"),
    "RNNCell": ("rnn_tanh_cell", "rnn_relu_cell"),
    "cross_entropy": ("cross_entropy_loss",),
    "group_norm": ("group_norm", "native_group_norm"),
    "layer_norm": ("layer_norm", "native_layer_norm"),
    "log_softmax": ("log_softmax", "_log_softmax"),
    "nll_loss": ("nll_loss", "nll_loss2d"),
    "norm": ("norm", "linalg_vector_norm", "linalg_matrix_norm", "frobenius_norm", "nuclear_norm"),
    "normalize": ("norm", "linalg_vector_norm"),
    # vmap decomposes the first into the second before autocast sees it; the same applies to the norms.
    "softmax": ("softmax", "_softmax"),
    "softmin": ("softmax", "_softmax"),
}

# The documented lists, then what torch registers beyond its documentation.
CUDA_LOW = _names(
    "__matmul__ addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d GRUCell linear LSTMCell matmul mm mv prelu RNNCell "
    "_convolution convolution conv_tbc cudnn_convolution cudnn_convolution_transpose einsum linalg_multi_dot linalg_vecdot "
    "scaled_dot_product_attention _scaled_dot_product_flash_attention"
)
CUDA_FP32 = _names(
    "__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cosh cosine_embedding_loss cdist "
    "cosine_similarity cross_entropy cumprod cumsum dist erfinv exp expm1 gelu group_norm hinge_embedding_loss kl_div l1_loss "
    "layer_norm log log_softmax log10 log1p log2 margin_ranking_loss mse_loss multilabel_margin_loss multi_margin_loss "
    "nll_loss norm normalize pdist poisson_nll_loss pow prod reciprocal rsqrt sinh smooth_l1_loss soft_margin_loss softmax "
    "softmin softplus sum renorm tan triplet_margin_loss "
    "huber_loss logsumexp rms_norm "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)
CUDA_WIDEST = _names(
    "addcdiv addcmul atan2 bilinear cat cross dot equal index_put stack tensordot grid_sampler scatter_add vdot"
)
CUDA_BAN = ("binary_cross_entropy",)

# Without a registration of their own on CUDA: composites of listed operations, with the same resulting dtype.
CUDA_BY_PARTS = ("cross_entropy_loss",)

# The CPU's low-precision registrations; every other operation registered for the CPU runs in float32.
CPU_LOW = _names(
    "_addmm_activation _convolution _native_multi_head_attention addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_tbc "
    "conv_transpose1d conv_transpose2d conv_transpose3d linalg_vecdot linear matmul mkldnn_rnn_layer mm prelu "
    "scaled_dot_product_attention"
)
CPU_WIDEST = ("cat", "stack", "index_copy")

# These promote mixed inputs themselves on every device, with or without autocast.
PROMOTE_BY_THEMSELVES = ("cat", "equal", "stack")

# Recommended by the error of a banned operation.
INSTEAD_OF = {
    "binary_cross_entropy": "binary_cross_entropy_with_logits or BCEWithLogitsLoss, which take the logits before the sigmoid",
}


def qualified_names(name: str) -> tuple[str, ...]:
    """Return the operations behind a public name, one of aten's, or `NAMESPACE::OP`: `LSTMCell` is `aten::lstm_cell` and its
    fused form.

    Raises:
        ValueError: If there is no such operation, or autocast may cast none of its overloads.
    """
    if not isinstance(name, str):
        raise ValueError(f"an operation is named by a string, such as 'softmax'; got {name!r}")  # noqa: TRY004  (one kind for all)
    names = (name,) if "::" in name else tuple(f"aten::{aten_name}" for aten_name in ALIASES.get(name, (name,)))
    existing = tuple(known for known in names if overloads_of(known))
    if not existing:
        raise ValueError(f"autocast knows no out-of-place operation {name!r}{_hint(name)}")
    return existing


def overloads_of(qualified: str) -> tuple[OpOverload, ...]:
    """Return the overloads of an operation that autocast may cast, see `_is_eligible`; empty if there are none yet."""
    try:
        return _existing_overloads(qualified)
    except LookupError:  # not cached, because a custom operation may be registered later
        return ()


def qualified_name(overload: OpOverload) -> str:
    """Return the dispatcher's name of an overload: `aten::softmax.int`."""
    return str(overload.name())  # type: ignore[no-untyped-call]


def find_overload(qualified: str) -> OpOverload:
    """Return the overload of a `qualified_name`."""
    namespace, _, name = qualified.partition("::")
    packet, _, overload = name.partition(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    return found


@cache
def _existing_overloads(qualified: str) -> tuple[OpOverload, ...]:
    namespace, _, name = qualified.partition("::")
    if not namespace.isidentifier() or not name.isidentifier() or name.startswith("__"):
        raise LookupError(qualified)
    packet = getattr(getattr(torch.ops, namespace), name, None)
    found: tuple[OpOverload, ...] = ()
    if isinstance(packet, torch._ops.OpOverloadPacket):  # noqa: SLF001  (torch names its operator classes nowhere else)
        overloads = (getattr(packet, name) for name in packet.overloads())  # type: ignore[no-untyped-call]
        found = tuple(overload for overload in overloads if _is_eligible(overload))
    if not found:
        raise LookupError(qualified)
    return found


def _is_eligible(overload: OpOverload) -> bool:
    # In-place and out= forms have the dtype of an existing tensor; a required dtype argument is an explicit choice; overloads
    # without a kernel exist only for TorchScript's numbers and lists.
    schema = overload._schema  # noqa: SLF001  (torch offers the schema under no other name)
    kinds = [str(argument.type) for argument in schema.arguments]
    return (
        torch._C._dispatch_has_kernel(qualified_name(overload))  # noqa: SLF001  (no public way to ask)
        and not schema.is_mutable
        and any("Tensor" in kind for kind in kinds)
        and not any("Dimname" in kind or kind == "Storage" for kind in kinds)
        and not any(_is_required_dtype(argument) for argument in schema.arguments)
    )


def _is_required_dtype(argument: torch._C.Argument) -> bool:
    return argument.name in {"dtype", "out_dtype"} and not str(argument.type).startswith("Optional")


def _hint(name: str) -> str:
    candidates = _custom_names() if "::" in name else _public_names()
    # torch.nn.functional.softmax, softmax.int, SOFTMAX
    tries = [*name.split(".")[::-1], *(part.lower() for part in name.split("."))]
    exact = [part for part in tries if part in candidates]
    close = exact or difflib.get_close_matches(name.rpartition(".")[2], candidates, n=1, cutoff=0.75 if "::" in name else 0.5)
    if close and close[0] != name:
        return f"; did you mean {close[0]!r}?"
    return "; register the custom operation before naming it" if "::" in name else ""


@cache
def _public_names() -> list[str]:
    names = {name.removeprefix("aten::").partition(".")[0] for name in _dispatched() if name.startswith("aten::")}
    public = (name for name in names if not name.startswith("_") and not name.endswith("_"))
    return sorted({*ALIASES, *(name for name in public if overloads_of(f"aten::{name}"))})


def _custom_names() -> list[str]:
    return sorted({name.partition(".")[0] for name in _dispatched()})


def _dispatched() -> list[str]:
    return list(torch._C._dispatch_get_all_op_names())  # noqa: SLF001  (no public list)


CUDA_RULES: dict[Rule, tuple[str, ...]] = {
    Rule.LOW: CUDA_LOW,
    Rule.FP32: CUDA_FP32,
    Rule.WIDEST: CUDA_WIDEST,
    Rule.BAN: CUDA_BAN,
}


@cache
def autocast_key(device_type: str) -> str:
    """Return the dispatch key of a device's autocast: `AutocastCPU`, `AutocastCUDA`."""
    custom = torch._C._get_privateuse1_backend_name()  # noqa: SLF001  (no public way to ask)
    return "AutocastPrivateUse1" if device_type == custom else f"Autocast{device_type.upper()}"


def has_autocast(device_type: str) -> bool:
    """Return whether torch has an autocast for a device type, such as `cpu`."""
    if not isinstance(device_type, str) or ":" in device_type:
        return False
    try:
        return bool(torch.amp.is_autocast_available(device_type))
    except RuntimeError:  # not even a device type
        return False


def rules_beyond_native(rules: Mapping[str, Rule], device_type: str) -> Mapping[str, Rule]:
    """Return the rules, by qualified overload name (`aten::softmax.int`), that are not torch's own on a device.

    Empty if torch already does everything that the rules say. torch's own form of `widest` never counts as ours: it raises
    where two low-precision dtypes meet.
    """
    return {
        qualified_name(overload): rule
        for name, rule in rules.items()
        for overload in overloads_of(name)
        if native_rule(overload, device_type) is not rule
        or (rule is Rule.WIDEST and _bare_name(name) not in PROMOTE_BY_THEMSELVES)
    }


def native_rule(overload: OpOverload, device_type: str) -> Rule | None:
    """Return the rule of torch's own autocast for an overload on a device; None if it leaves the inputs as they are."""
    qualified = qualified_name(overload)
    name = _bare_name(qualified)
    if not qualified.startswith("aten::"):
        return None  # a custom operation may have a rule of its own (`register_autocast`), which torch does not tell
    if name in PROMOTE_BY_THEMSELVES:
        return Rule.WIDEST
    if device_type == "cuda":
        return _cuda_rules().get(name)
    if device_type != "cpu" or qualified not in _registered(device_type):
        return None
    if name in CPU_LOW:
        return Rule.LOW
    return Rule.WIDEST if name in CPU_WIDEST else Rule.FP32


def explain_rule(name: str, rule: Rule | None, policy: str, device_type: str) -> str:
    """Return the rule in force for an operation on a device, and whose rule it is, in one line."""
    native = {native_rule(overload, device_type) for overload in overloads_of(name)} - {None}
    by_torch = "/".join(sorted(str(own) for own in native)) or "its inputs' dtypes"
    shown = name.removeprefix("aten::")
    if rule is None or native == {rule}:
        return f"{shown} on {device_type}: {by_torch} (torch's own rule)"
    return f"{shown} on {device_type}: {rule} (by the policy {policy}; torch's own rule: {by_torch})"


def _bare_name(qualified: str) -> str:
    return qualified.partition("::")[2].partition(".")[0]


@cache
def _registered(device_type: str) -> frozenset[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(autocast_key(device_type))  # noqa: SLF001  (no public list)
    return frozenset(names)


@cache
def _cuda_rules() -> Mapping[str, Rule]:
    # Overloads without a registration of their own (conv1d.padding) are composites of registered ones and share the operation's
    # rule.
    known = {_bare_name(name) for name in _registered("cuda")} | set(CUDA_BY_PARTS)
    listed = ((op, rule) for rule, ops in CUDA_RULES.items() for op in ops)
    rules = {_bare_name(name): rule for op, rule in listed for name in qualified_names(op)}
    return {name: rule for name, rule in rules.items() if name in known}
