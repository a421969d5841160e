"""A .pt2: the program that torch.export.save wrote, with its own example inputs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfserve.export.errors import ExportError
from halfserve.export.samples import Samples
from halfserve.export.sources.sample_files import read_arrays
from halfserve.export.sources.source import Source, repository_name
from halfserve.export.sources.source_options import SourceOptions
from halfserve.export.to_onnx.capture import one_line

OWN_EXAMPLES = "the samples are the program's own example inputs; give --samples FILE.npz for a verdict on more"


def open_exported_program(path: Path, options: SourceOptions) -> Source:
    """The module of an exported program.

    Args:
        path: The .pt2 file.
        options: The user's options; `samples` replace the program's example inputs.

    Raises:
        ExportError: The file cannot be read, or brings no example inputs and no samples are given.
    """
    logging.getLogger("torch").setLevel(logging.ERROR)
    try:
        program = torch.export.load(path)
        module = program.module()
    except Exception as error:  # torch raises anything for a damaged file
        raise ExportError(f"cannot read the program {path}: {one_line(error)}; save it again with torch.export.save") from error
    if options.samples is not None:
        samples = Samples(inputs=read_arrays(options.samples, options.max_samples), labels=None)
    else:
        samples = Samples(inputs=_examples(program, path), labels=None, note=OWN_EXAMPLES)
    return Source(module=_Evaluated(module), samples=samples, name=repository_name(path.stem))


class _Evaluated(nn.Module):
    """A program's module, whose mode is fixed: its own `eval` raises."""

    def __init__(self, program: nn.Module) -> None:
        super().__init__()
        self.program = program
        self.forward = program.forward
        for part in self.modules():
            part.training = False

    def train(self, mode: bool = True) -> _Evaluated:
        """Nothing: the program was captured in one mode."""
        del mode
        return self


def _examples(program: torch.export.ExportedProgram, path: Path) -> Any:
    if program.example_inputs is None:
        raise ExportError(f"{path} brings no example inputs; give --samples FILE.npz")
    args, named = program.example_inputs
    if not all(isinstance(value, Tensor) for value in (*args, *named.values())):
        raise ExportError(f"{path} takes more than tensors; export a module of tensors alone, or give --samples FILE.npz")
    if named and not args:
        return dict(named)
    return args[0] if len(args) == 1 and not named else tuple(args)
