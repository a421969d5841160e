"""Which submodules an autocast policy wants in float32: what was pinned for training stays pinned in the artefact."""

from __future__ import annotations

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


def pinned_modules(module: nn.Module, policy: Policy | None) -> dict[str, str]:
    """The submodules whose operation the policy's own changes run in float32.

    A preset's lists do not count: they describe autocast, where a cast is cheap insurance. What a user added to them was found
    to be needed. Only calls of modules are seen, not `torch.nn.functional` calls inside a `forward`.

    Returns:
        Dotted module name -> the operation's name.
    """
    if policy is None:
        return {}
    rules = Policy(changes=policy.changes).rules()
    return {
        name: MODULE_OPS[type(part)]
        for name, part in module.named_modules()
        if type(part) in MODULE_OPS and rules.get(f"aten::{MODULE_OPS[type(part)]}") is Rule.FP32
    }
