"""Modules that bring no description of their inputs: a factory's, a pickled one, or an exported program (.pt2)."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfserve.amp_core.weights.state_dicts import load_into, load_weights, prefix_of, torch_content
from halfserve.export.export_errors import ExportError
from halfserve.export.repository.version_writer import FACTORY
from halfserve.export.samples import Samples, model_of
from halfserve.export.sources.sample_files import array_samples
from halfserve.export.sources.source import Source, factory_name, repository_name, with_training
from halfserve.export.sources.source_options import SourceOptions
from halfserve.export.to_onnx.capture import one_line

OWN_EXAMPLES = "the samples are the program's own example inputs; give --samples FILE.npz for a verdict on more"


def open_factory(factory: str, options: SourceOptions) -> Source:
    """Return the module that `MODULE:FACTORY` makes, with the weights that are given, if any.

    Raises:
        ExportError: The factory fails, or samples are missing or unreadable.
        WeightsError: The weights cannot be read or do not fit.
    """
    samples = _samples(options, factory)
    module = model_of(factory)
    samples = samples.fitting(module)
    source = Source(module=module.eval(), samples=samples, name=factory_name(factory), metadata={FACTORY: factory})
    if options.weights is None:
        return source
    if options.trust_pickle and options.weights.is_file():
        raise ExportError("--trust-pickle opens a pickled module, which needs no factory; leave it or MODULE:FACTORY out")
    weights = load_weights(options.weights)
    note = load_into(module, weights, str(options.weights))
    prefix = prefix_of(weights, module.state_dict())
    return with_training(replace(source, samples=samples.noting(note)), options.weights, module, prefix=prefix)


def open_pickled_module(path: Path, options: SourceOptions) -> Source:
    """Return the module that `torch.save(module)` wrote.

    Raises:
        ExportError: The user does not trust it, it cannot be read or is no module, or samples are missing or unreadable.
    """
    if not options.trust_pickle:
        torch_content(path)  # says what the file is
        raise ExportError(f"{path} holds neither weights nor a module; expected a state dict, or a module with --trust-pickle")
    try:
        module = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # the file runs code of its own
        raise ExportError(
            f"{path} is no whole file of torch.save: {one_line(error)}; expected what torch.save(module, FILE) writes"
        ) from error
    if not isinstance(module, nn.Module):
        raise ExportError(
            f"{path} holds a {type(module).__name__}; expected a torch.nn.Module, as torch.save(module, FILE) writes"
        )
    module = module.float().eval()
    return Source(module=module, samples=_samples(options, str(path)).fitting(module), name=repository_name(path.stem))


def open_exported_program(path: Path, options: SourceOptions) -> Source:
    """Return the module of an exported program (.pt2), whose example inputs are the samples where no others are given.

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
        samples = array_samples(options.samples, options.max_samples)
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


def _samples(options: SourceOptions, source: str) -> Samples:
    if options.samples is None:
        raise ExportError(
            f"{source} brings no samples, and without any nothing is proved; write some of your inputs with "
            "numpy.savez('samples.npz', PARAMETER=array) and give --samples samples.npz"
        )
    return array_samples(options.samples, options.max_samples)
