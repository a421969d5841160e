"""Settings of a conversion: one object that is the commands' options, and that every step takes whole.

A new option is a field here with its help, its keyword, and its use.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any, Self, TypedDict

import typer

from halfserve.export.export_errors import UsageError
from halfserve.export.half_types import Accumulators, DtypeChoice, HalfName, HalfType, TargetDevice, half_named
from halfserve.export.onnx_files.model_writer import ExternalData
from halfserve.option_groups import CommandLineType

conversion = partial(typer.Option, rich_help_panel="Conversion")
verification = partial(typer.Option, rich_help_panel="Verification")

MAX_RUNS = 120
FEWEST_RUNS = 2  # one with all nodes in float16, one with none


@dataclass(frozen=True, kw_only=True)
class ConversionSettings:
    """Settings of an ONNX graph's conversion. Equal settings compare equal: names are sorted, each once."""

    keep_fp32_nodes: Annotated[
        Collection[str],
        CommandLineType(list[str]),
        conversion(help="Node to keep in float32, as a shell pattern; may be repeated."),
    ] = ()
    keep_fp32_ops: Annotated[
        Collection[str],
        CommandLineType(list[str]),
        conversion(help="Operator to keep in float32, as a shell pattern; may be repeated."),
    ] = ()
    dtype: Annotated[
        DtypeChoice,
        conversion(
            help="Type to convert to. auto: float16 if it passes, otherwise bfloat16 if that passes, otherwise a "
            "search for nodes to keep in float32; the reason is printed."
        ),
    ] = "float16"
    # From Python also names and shell patterns of the inputs and outputs that keep their types.
    keep_io_types: Annotated[
        bool | Collection[str],
        CommandLineType(bool),
        conversion("--keep-io-types/--float16-io", help="Inputs and outputs stay float32, or become --dtype too."),
    ] = True
    repair: Annotated[
        bool, conversion(help="Rewrite nodes whose numbers the type cannot hold, such as large BatchNorm statistics.")
    ] = True
    upgrade_opset: Annotated[
        bool,
        conversion(
            "--upgrade-opset",
            help="Raise an older model's opset: LayerNormalization is one operator from 17, and Conv takes bfloat16 from 22.",
        ),
    ] = False
    # ONNX Runtime refuses a bfloat16 node without a kernel on CUDA. "cuda" also spells out SiLU, whose kernel rounds inside.
    target_device: Annotated[
        TargetDevice,
        conversion(
            "--target", help="Where the model shall run; for cuda and any, bfloat16 nodes without a CUDA kernel stay float32."
        ),
    ] = "any"

    def __post_init__(self) -> None:
        for name in ("keep_fp32_nodes", "keep_fp32_ops", "keep_io_types"):
            given = getattr(self, name)
            if not isinstance(given, bool):
                names = {given} if isinstance(given, str) else set(given or ())
                object.__setattr__(self, name, tuple(sorted(names)))

    @property
    def half(self) -> HalfType:
        """The type to convert to.

        Raises:
            UsageError: `dtype` is another one, or "auto", which has not been decided yet.
        """
        return half_named(self.dtype)

    @property
    def needs_cuda_kernels(self) -> bool:
        """Whether a node without a CUDA kernel for the half type must stay float32: casts are added around float16 alone."""
        return self.half.has_float32_range and self.target_device != "cpu"

    def keeps(self, name: str | None) -> bool:
        """Return whether the input or output of this name keeps its type."""
        if isinstance(self.keep_io_types, bool):
            return self.keep_io_types
        return any(fnmatchcase(name or "", pattern) for pattern in self.keep_io_types)

    @classmethod
    def of_call(cls, function: str, **keywords: Any) -> Self:
        """Return the settings that the keywords of a public function give.

        Raises:
            TypeError: there is no such keyword; the text names the function, and the nearest keyword.
            UsageError: a value is invalid.
        """
        known = [field.name for field in fields(cls)]
        for name in keywords:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                advice = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{advice}")
        return cls(**keywords)


@dataclass(frozen=True, kw_only=True)
class PipelineSettings(ConversionSettings):
    """Settings of a conversion with its verification and search; the command `convert` has them as options.

    Raises:
        UsageError: A limit of the search is out of range, or a precision has another name.
    """

    external_data: Annotated[
        ExternalData,
        conversion(help="Weights in separate data files: yes, no, or auto: as in the source, and for models over 2 GiB."),
    ] = "auto"
    adversarial: Annotated[
        bool, verification(help="Try inputs at the edge of the samples too: zeros, large ones, masked rows.")
    ] = True
    accumulators: Annotated[
        Accumulators,
        verification(help="Type in which the runtime adds up products: float32 as ONNX Runtime, or float16 as TensorRT."),
    ] = "float32"
    precisions: Annotated[
        Collection[HalfName],
        CommandLineType(str, default=""),
        verification(
            help="Precisions to judge the file in beside its own, such as float16,bfloat16: a server may compute it in each "
            "that passed.",
            show_default=False,
        ),
    ] = ()
    search: Annotated[bool, verification(help="Find the fewest nodes to keep in float32 where the result is over budget.")] = (
        True
    )
    # The first two runs are always made, since without them there is no result; a run in progress is finished.
    max_runs: Annotated[
        int, verification(help="How many sets of such nodes the search may try; it keeps the smallest that passed.")
    ] = MAX_RUNS
    max_minutes: Annotated[
        float | None, verification(help="Minutes after which the search tries no further set; no limit by default.")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.precisions, str):
            object.__setattr__(self, "precisions", precisions_of(self.precisions))
        if self.max_runs < FEWEST_RUNS:
            raise UsageError(
                f"max_runs is {self.max_runs}; expected at least {FEWEST_RUNS}: one with all nodes in float16, one with none"
            )
        if self.max_minutes is not None and not (self.max_minutes > 0 and math.isfinite(self.max_minutes)):
            raise UsageError(f"max_minutes is {self.max_minutes}; expected a number above 0")


@dataclass(frozen=True, kw_only=True)
class ModuleSettings(PipelineSettings):
    """Settings of a torch module's conversion, with verification and search; the command `export` has them as options."""

    keep_fp32: Annotated[
        Collection[str],
        CommandLineType(list[str]),
        conversion(help="Tensor or submodule to keep in float32, as a shell pattern; may be repeated."),
    ] = ()
    # No options of the command: the exporter chooses the opset, so nothing depends on it, and the files' form.
    repair: bool = True
    upgrade_opset: bool = True
    external_data: ExternalData = "auto"


class ConversionKeywords(TypedDict, total=False):
    """The fields of `ConversionSettings`, as keywords of a Python function."""

    keep_fp32_nodes: Collection[str]
    keep_fp32_ops: Collection[str]
    dtype: DtypeChoice
    keep_io_types: bool | Collection[str]
    repair: bool
    upgrade_opset: bool
    target_device: TargetDevice


class PipelineKeywords(ConversionKeywords, total=False):
    """The fields of `PipelineSettings`, as keywords of a Python function."""

    external_data: ExternalData
    adversarial: bool
    accumulators: Accumulators
    precisions: Collection[HalfName]
    search: bool
    max_runs: int
    max_minutes: float | None


class ModuleKeywords(PipelineKeywords, total=False):
    """The fields of `ModuleSettings`, as keywords of a Python function."""

    keep_fp32: Collection[str]


def precisions_of(text: str) -> tuple[HalfName, ...]:
    """Parse `--precisions`: names of half-precision types with commas between them.

    Raises:
        UsageError: A name is another one.
    """
    try:
        return tuple(half_named(name.strip()).name for name in text.split(",")) if text else ()
    except UsageError as error:
        raise UsageError(f"--precisions {text}: {error}") from None
