"""Results of a conversion: a model that was written, or the failure of a search."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from halfserve.export.certificate.certificate import BudgetExceeded, Certificate
from halfserve.export.placement.audit import Placement
from halfserve.export.placement.cuda_kernels import CudaWarning

if TYPE_CHECKING:
    from halfserve.export.onnx_fp16.conversion_report import ConversionReport
    from halfserve.export.search.result import SearchResult


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A model that was written.

    Attributes:
        path: The model's file, or its version's folder in a repository; relative to the URL for one in object storage.
        source_bytes: Size of the float32 model, data files included.
        size_bytes: Size of the converted model, data files included.
        report: The report of the conversion.
        certificate: The verdict; None without verification.
        placement: The placement of the nodes by ONNX Runtime, or the reason why it is unknown.
        search: The nodes that need float32; None without a search.
        superseded: Data files beside it that only the model before it used.
        cuda: The nodes that CUDA would not compute as they are; empty for a model for CPUs alone.
        growth: The reason why it is larger than the float32 model; None if it is not.
        url: The URL of its version in object storage, without credentials; "" for files on this machine.
    """

    path: Path
    source_bytes: int
    size_bytes: int
    report: ConversionReport
    certificate: Certificate | None
    placement: Placement | str
    search: SearchResult | None
    superseded: tuple[str, ...]
    cuda: tuple[CudaWarning, ...] = ()
    growth: str | None = None
    url: str = ""

    @property
    def place(self) -> str:
        """Where it was written, for people: a path or a URL."""
        return self.url or str(self.path)


@dataclass(frozen=True, kw_only=True)
class Certified(Converted):
    """A model that was verified and written; see `Converted`."""

    certificate: Certificate


class SearchFailed(BudgetExceeded):
    """The converted model is over budget, and the search found no set of float32 nodes that brings it within.

    Attributes:
        search: The result of the search. If it passed, its set was within the budget in the search but over it in the
            verification, or it leaves nothing in half precision.
    """

    def __init__(self, error: BudgetExceeded, search: SearchResult, *, nothing_left: str = "") -> None:
        if nothing_left:
            found = "; ".join(part for part in (nothing_left, search.explanation) if part)
        elif search.passed:
            found = (
                f"with {len(search.keep_fp32_nodes)} nodes in float32 it was within the budget when the search tried it, and "
                "verified again it is not: one of the two models gives different outputs for the same input"
            )
        else:
            why = f": {search.explanation}" if search.explanation else ""
            found = f"the search for nodes to keep in float32 found no set that is enough{why}"
        cause = "; ".join(part for part in (error.cause, found) if part)
        super().__init__(error.violation, error.certificate, cause=cause)
        self.search = search
