"""Every operation of torch's own database of operations, under the default policy and under `Policy.cuda()`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.long

# What Policy.cuda() changes though the documentation does not name it, by the reason.
_REASONS = {
    "registered by torch for CUDA beyond its documentation": "einsum logsumexp linalg.matrix_norm linalg.vector_norm "
    "native_group_norm native_layer_norm nn.functional.rms_norm nn.functional.grid_sample nn.functional.interpolate.nearest "
    "nn.functional.interpolate.nearest-exact nn.functional.interpolate.linear nn.functional.interpolate.bilinear "
    "nn.functional.interpolate.bicubic nn.functional.interpolate.trilinear nn.functional.upsample_bilinear "
    "nn.functional.upsample_nearest",
    "made of listed operations": "sum_to_size cov ldexp matrix_exp square trapz trapezoid cumulative_trapezoid "
    "mvlgamma.mvlgamma_p_1 mvlgamma.mvlgamma_p_3 mvlgamma.mvlgamma_p_5 nn.functional.local_response_norm "
    "nn.functional.multilabel_soft_margin_loss nn.functional.triplet_margin_with_distance_loss "
    "nn.functional.gaussian_nll_loss nn.functional.pairwise_distance nn.functional.multi_head_attention_forward",
    "bears a listed name but passes dtype=, which wins": "masked.sum masked.prod masked.cumsum masked.cumprod masked.norm "
    "masked.softmax masked.log_softmax masked.softmin masked.normalize",
    "bears a listed name but is another operation": "sparse.mm.reduce",
    "banned": "nn.functional.binary_cross_entropy",
}
NOT_BY_NAME = {op: reason for reason, ops in _REASONS.items() for op in ops.split()}

_KNOWS_RMS_NORM = "aten::rms_norm" in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")  # not in 2.11
# Where CPU tensors under Policy.cuda() and CUDA tensors under torch.autocast have different dtypes, by the reason.
_CPU_REASONS = {
    "unlisted: torch's own rule for the CPU is float32": "nn.functional.adaptive_avg_pool3d nn.functional.adaptive_max_pool3d "
    "nn.functional.pad.reflect nn.functional.pad.replicate nn.functional.pad.replicate_negative grid_sampler_3d trace "
    "nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d nn.functional.max_unpool1d "
    "nn.functional.max_unpool1d.grad nn.functional.max_unpool2d nn.functional.max_unpool2d.grad nn.functional.max_unpool3d "
    "nn.functional.max_unpool3d.grad view_as_complex nn.functional.max_pool3d native_batch_norm _native_batch_norm_legit "
    "_batch_norm_with_update grid_sampler_2d",  # these two can be compared with a build of torch for CUDA alone
    "unlisted: the CPU takes it apart in another way": "svd_lowrank pca_lowrank linalg.pinv linalg.pinv.hermitian",
    "made of listed operations that tensors without memory do not reach": "ldexp matrix_exp mvlgamma.mvlgamma_p_1 "
    "mvlgamma.mvlgamma_p_3 mvlgamma.mvlgamma_p_5",
    "documented, but torch registers nothing for it": "nn.functional.gelu native_group_norm",
    "in the documentation of a later torch": "" if _KNOWS_RMS_NORM else "nn.functional.rms_norm",
}
NOT_AS_ON_CUDA = {op: reason for reason, ops in _CPU_REASONS.items() for op in ops.split()}


@pytest.fixture(scope="module")
def comparisons() -> Any:
    program = [sys.executable, "-m", "tests.amp_core.autocast.opinfo_program"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(program, capture_output=True, text=True, check=False, env=environment, timeout=500)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_the_default_policy_is_torchs_own_bit_for_bit(comparisons: Any) -> None:
    assert comparisons["torch"]["different"] == {}
    assert comparisons["torch"]["compared"] > 4000


def test_policy_cuda_follows_the_documentation_and_leaves_the_rest_to_torch(comparisons: Any) -> None:
    different = comparisons["rules"]["different"]
    assert {op: different[op] for op in different.keys() - NOT_BY_NAME.keys()} == {}
    assert comparisons["rules"]["compared"] > 2000


def test_policy_cuda_on_the_cpu_gives_the_dtypes_of_torchs_cuda_autocast(comparisons: Any) -> None:
    different = comparisons["cuda"]["different"]
    assert {op: different[op] for op in different.keys() - NOT_AS_ON_CUDA.keys()} == {}
    assert comparisons["cuda"]["compared"] > 1000
