"""What to tell a user whose model is over budget."""

from __future__ import annotations

from export.certificate.certificate import Certificate
from export.verification.budget import NOTHING_FINITE


def advice(certificate: Certificate) -> str:
    """The worst offence, how many more there are, and what to do, in one line."""
    offences = certificate.violations
    if not offences:
        return "no output could be compared, so nothing is proved; give samples for which the model answers with tensors"
    more = f" (and {len(offences) - 1} more over budget)" if len(offences) > 1 else ""
    if all(NOTHING_FINITE in offence for offence in offences):
        return f"{offences[0]}{more}"
    non_finite = any(verdict.figures.non_finite > certificate.budget.max_non_finite for verdict in certificate.outputs)
    parts = "the layers that overflow" if non_finite else "sensitive layers"
    return f"{offences[0]}{more}; keep {parts} in float32 ({_means(certificate)}) or allow a larger difference"


def _means(certificate: Certificate) -> str:
    from_onnx = certificate.conversion is not None and "fp16_nodes" in certificate.conversion
    return "--block-node, --block-op" if from_onnx else "keep_fp32, --keep-fp32"
