"""A module from a function of the user's, with weights from a file; or from a pickle that the user trusts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from halfserve.amp_core.weights.state_dicts import load_into, load_weights, prefix_of, torch_content
from halfserve.export.errors import ExportError
from halfserve.export.repository.version_writer import FACTORY
from halfserve.export.samples import Samples, model_of
from halfserve.export.sources.sample_files import read_arrays
from halfserve.export.sources.source import Source, factory_name, repository_name
from halfserve.export.sources.source_options import SourceOptions
from halfserve.export.sources.training import with_training
from halfserve.export.to_onnx.capture import one_line


def open_factory(factory: str, options: SourceOptions) -> Source:
    """The module that `MODULE:FACTORY` makes.

    Args:
        factory: Returns the module.
        options: The user's options; `weights` are loaded into the module if given; `samples` are required.

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
    """The module that `torch.save(module)` wrote.

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


def _samples(options: SourceOptions, source: str) -> Samples:
    if options.samples is None:
        raise ExportError(
            f"{source} brings no samples, and without any nothing is proved; write some of your inputs with "
            "numpy.savez('samples.npz', PARAMETER=array) and give --samples samples.npz"
        )
    return Samples(inputs=read_arrays(options.samples, options.max_samples), labels=None)
