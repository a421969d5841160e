"""Which submodules must compute in float32 whatever their tensors are: by the policy, by the model, by what they are."""

from __future__ import annotations

import re

from torch import nn

from amp_core.policy import Policy, Rule

# The operation that a call of such a module runs, by its name in aten.
MODULE_OPS: dict[type[nn.Module], str] = {
    nn.BatchNorm1d: "batch_norm",
    nn.BatchNorm2d: "batch_norm",
    nn.BatchNorm3d: "batch_norm",
    nn.Bilinear: "bilinear",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose1d: "conv_transpose1d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
    nn.Embedding: "embedding",
    nn.GELU: "gelu",
    nn.GroupNorm: "group_norm",
    nn.LayerNorm: "layer_norm",
    nn.Linear: "linear",
    nn.LogSoftmax: "log_softmax",
    nn.PReLU: "prelu",
    nn.RMSNorm: "rms_norm",
    nn.Softmax: "softmax",
    nn.Softplus: "softplus",
}
QUANTIZED = ("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.")


def pinned_modules(module: nn.Module, policy: Policy | None = None) -> dict[str, str]:
    """The submodules that stay in float32 as a whole.

    - Those whose operation the policy's own changes run in float32. A preset's lists do not count: they describe autocast,
      where a cast is cheap insurance; what a user added to them was found to be needed. Only calls of modules are seen, not
      `torch.nn.functional` calls inside a `forward`.
    - Those that a transformers model names in `_keep_in_fp32_modules`.
    - Quantized ones, which take float32.

    Returns:
        Dotted module name -> the reason.
    """
    return {**_by_policy(module, policy), **_by_the_model(module), **_quantized(module)}


def _by_policy(module: nn.Module, policy: Policy | None) -> dict[str, str]:
    if policy is None:
        return {}
    rules = Policy(changes=policy.changes).rules()
    return {
        name: f"the policy runs {MODULE_OPS[type(part)]} in float32"
        for name, part in module.named_modules(remove_duplicate=False)
        if type(part) in MODULE_OPS and rules.get(f"aten::{MODULE_OPS[type(part)]}") is Rule.FP32
    }


def _by_the_model(module: nn.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for root, part in module.named_modules():
        wanted = {
            *(getattr(part, "_keep_in_fp32_modules", None) or ()),
            *(getattr(part, "_keep_in_fp32_modules_strict", None) or ()),
        }
        if not wanted:
            continue
        pattern = re.compile(rf"(^|\.)({'|'.join(sorted(wanted))})$")
        for name, _ in part.named_modules():
            if name and pattern.search(name):
                found[f"{root}.{name}" if root else name] = "the model's own _keep_in_fp32_modules"
    return found


def _quantized(module: nn.Module) -> dict[str, str]:
    return {
        name: "quantized: it takes float32"
        for name, part in module.named_modules(remove_duplicate=False)
        if f"{type(part).__module__}.".startswith(QUANTIZED)
    }
