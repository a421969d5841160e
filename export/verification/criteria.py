"""Criteria of a verification: what a converted model is compared with, and within which limits, in search and verdict alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from halfserve.export.half_types import HalfName
from halfserve.export.onnx_files.model_file import ModelFile, ModelSource

if TYPE_CHECKING:
    from torch import nn

    from halfserve.amp_core.recorder.record import Record
    from halfserve.export.certificate.budget import Budget
    from halfserve.export.verification.generated.lengths import LongerSizes
    from halfserve.export.verification.judging import Judge
    from halfserve.export.verification.samples import SampleSet, Values
    from halfserve.protos.certificate_signature import SigningKey


@dataclass(frozen=True, kw_only=True)
class Criteria:
    """Limits of a converted model, and the model to compare it with; its settings say in which types and on which samples.

    Attributes:
        budget: How much the converted model may differ: one budget for every type, or one by type.
        reference: The float32 torch module or ONNX model to compare with; by default the model that is converted.
        labels: The true classes of the samples: integers, in the first output's shape without its class axis.
        record: The training record, whose modules the search tries first.
        task: Judges the first output in the terms of the model's task; by default its rows' argmax counts.
        lengths: Sizes to try beside the samples', where `adversarial`. With None the verdict tries sizes that the float32
            model takes, and the search none.
        longest: The largest sizes of dynamic dimensions, by name, which are tried in place of `lengths`.
        batch_size: Samples per run. A model with a fixed batch runs in that size, and a remainder is left out.
        cuda: Whether the verdict is about a GPU too; None where there is one.
    """

    budget: Budget | Mapping[HalfName, Budget]
    reference: nn.Module | ModelSource | ModelFile | None = None
    labels: Values | None = None
    record: Record | None = None
    task: Judge | None = None
    lengths: LongerSizes | None = None
    longest: Mapping[str, int] | None = None
    batch_size: int = 32
    cuda: bool | None = None

    def budget_of(self, dtype: HalfName) -> Budget:
        """Return the limits for a model of this type."""
        return self.budget[dtype] if isinstance(self.budget, Mapping) else self.budget


@dataclass(frozen=True, kw_only=True)
class Verification(Criteria):
    """Criteria, the samples, and what the certificate says besides.

    Attributes:
        samples: Makes or loads the samples for a model, with a note on them.
        notes: Remarks for the certificate, beside the samples' own.
        origin: Where the float32 model was fetched from; see `Certificate`.
        key: Signs the certificate; None leaves it unsigned.
    """

    samples: Callable[[ModelFile], SampleSet]
    notes: tuple[str, ...] = ()
    origin: Mapping[str, str] = field(default_factory=dict)
    key: SigningKey | None = None
