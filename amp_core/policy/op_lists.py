"""Which operations autocast touches: the documented CUDA lists, and what torch registers per device. Tables, no logic.

Names are those of aten (`torch.ops.aten`), except in `ALIASES`, whose keys are the public names that differ.
Source: torch's documentation of automatic mixed precision ("CUDA Op-Specific Behavior") and the registrations of torch 2.13.
"""

from __future__ import annotations


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
    # The second is what vmap leaves of the first before autocast sees it; so with the norms.
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

# On CUDA these have no registration of their own: they are made of listed operations, which gives the same dtype.
CUDA_BY_PARTS = ("cross_entropy_loss",)

# The CPU's registrations are these; every other operation registered for the CPU runs in float32.
CPU_LOW = _names(
    "_addmm_activation _convolution _native_multi_head_attention addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_tbc "
    "conv_transpose1d conv_transpose2d conv_transpose3d linalg_vecdot linear matmul mkldnn_rnn_layer mm prelu "
    "scaled_dot_product_attention"
)
CPU_WIDEST = ("cat", "stack", "index_copy")

# These promote mixed inputs by themselves on every device, whether autocast knows them or not.
PROMOTE_BY_THEMSELVES = ("cat", "equal", "stack")

# What a banned operation's error recommends.
INSTEAD_OF = {
    "binary_cross_entropy": "binary_cross_entropy_with_logits or BCEWithLogitsLoss, which take the logits before the sigmoid",
}
