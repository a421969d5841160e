"""Options of a source, for the command and for the readers of each kind; importing them is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from halfserve.export.conversion_settings import verification


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
        typer.Option(help="The task of a Hugging Face folder, such as embeddings; by default from its architecture."),
    ] = None
    trust_pickle: Annotated[bool, typer.Option("--trust-pickle", help="Open a pickled module, which may run any code.")] = False
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the Python code in a Hugging Face folder.")
    ] = False
    samples: Annotated[
        Path | None,
        verification(
            help="Samples to verify on: an .npz with an array for each parameter of forward, an .npy, a text file with a "
            "sentence in each line, a folder of pictures or .wav files, or a folder of captured requests."
        ),
    ] = None
    max_samples: Annotated[int, verification(min=1, help="How many samples to verify on, at most.")] = 1024
