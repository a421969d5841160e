"""Options of sources, conversion and verification, for commands and Python functions; importing them is quick."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from halfserve.export.export_errors import UsageError
from halfserve.export.half_types import Accumulators, DtypeChoice, TargetDevice
from halfserve.export.onnx_files.model_writer import ExternalData
from halfserve.option_groups import CommandLineType

conversion = partial(typer.Option, rich_help_panel="Conversion")
verification = partial(typer.Option, rich_help_panel="Verification")

MAX_RUNS = 120
FEWEST_RUNS = 2  # one with all nodes in float16, one with none

Dtype: TypeAlias = Annotated[
    DtypeChoice,
    conversion(help="The type to convert to; auto takes float16 where it passes, else bfloat16, else searches, and says why."),
]
Target: TypeAlias = Annotated[
    TargetDevice,
    conversion(
        "--target", help="Where the model shall run; for cuda and any, bfloat16 nodes without a CUDA kernel stay float32."
    ),
]
# From Python also names and shell patterns of the inputs and outputs that keep their types.
KeepIoTypes: TypeAlias = Annotated[
    bool | Collection[str],
    CommandLineType(bool),
    conversion("--keep-io-types/--float16-io", help="Inputs and outputs stay float32, or become --dtype too."),
]


@dataclass(frozen=True, kw_only=True)
class KeptNodes:
    """Nodes of the ONNX graph that stay in float32."""

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


@dataclass(frozen=True, kw_only=True)
class ConversionOptions(KeptNodes):
    """Options of an ONNX model's conversion; see `halfserve.convert_file`."""

    dtype: Dtype = "float16"
    keep_io_types: KeepIoTypes = True
    repair: Annotated[bool, conversion(help="Rewrite what the type could not hold, as large BatchNorm statistics.")] = True
    upgrade_opset: Annotated[
        bool,
        conversion(
            "--upgrade-opset",
            help="Raise an older model's opset: LayerNormalization is one operator from 17, and Conv takes bfloat16 from 22.",
        ),
    ] = False
    target_device: Target = "any"
    external_data: Annotated[
        ExternalData, conversion(help="Weights in files of their own: as in the source or over 2 GiB, always, or never.")
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class ModuleConversionOptions(KeptNodes):
    """Options of a torch module's conversion; see `halfserve.export_module`."""

    keep_fp32: Annotated[
        Collection[str],
        CommandLineType(list[str]),
        conversion(help="Tensor or submodule to keep in float32, as a shell pattern; may be repeated."),
    ] = ()
    dtype: Dtype = "float16"
    keep_io_types: KeepIoTypes = True
    target_device: Target = "any"


@dataclass(frozen=True, kw_only=True)
class VerificationOptions:
    """Conditions under which the converted model must stay within the budget."""

    adversarial: Annotated[
        bool, verification(help="Try inputs at the edge of the samples too: zeros, large ones, masked rows.")
    ] = True
    accumulators: Annotated[
        Accumulators, verification(help="In which type the runtime sums: float32 as ONNX Runtime, or float16 as TensorRT.")
    ] = "float32"


@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """Limits of a search. The first two runs are always made, since without them there is no result.

    Attributes:
        max_runs: Largest count of sets to try; at least 2.
        max_minutes: Time after which no further set is tried; None for no limit. A run in progress is finished.

    Raises:
        UsageError: A limit is out of range.
    """

    max_runs: Annotated[
        int, verification(help="How many sets of such nodes the search may try; it keeps the smallest that passed.")
    ] = MAX_RUNS
    max_minutes: Annotated[
        float | None, verification(help="Minutes after which the search tries no further set; no limit by default.")
    ] = None

    def __post_init__(self) -> None:
        if self.max_runs < FEWEST_RUNS:
            raise UsageError(
                f"max_runs is {self.max_runs}; expected at least {FEWEST_RUNS}: one with all nodes in float16, one with none"
            )
        if self.max_minutes is not None and not (self.max_minutes > 0 and math.isfinite(self.max_minutes)):
            raise UsageError(f"max_minutes is {self.max_minutes}; expected a number above 0")


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Whether nodes to keep in float32 are searched for, and when the search ends."""

    search: Annotated[bool, verification(help="Find the fewest nodes to keep in float32 where the result is over budget.")] = (
        True
    )
    limits: SearchLimits = SearchLimits()


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Options of a source. By default the weights, the samples and the task are the source's own, where it has some."""

    weights: Annotated[
        Path | None,
        typer.Option(
            help="Weights for a function's or library's model: .safetensors, .pt, .pth, sharded, or a folder of them."
        ),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(help="The task of a Hugging Face folder, such as embeddings; by default as its architecture says."),
    ] = None
    trust_pickle: Annotated[bool, typer.Option("--trust-pickle", help="Open a pickled module, which may run any code.")] = False
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the Python code that a Hugging Face folder brings.")
    ] = False
    samples: Annotated[
        Path | None,
        verification(
            help="Samples to verify on: an .npz with an array for each parameter of forward, an .npy, a text file with a "
            "sentence in each line, or a folder of pictures or .wav files."
        ),
    ] = None
    max_samples: Annotated[int, verification(min=1, help="How many samples to verify on, at most.")] = 1024
