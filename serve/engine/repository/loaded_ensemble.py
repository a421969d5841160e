"""Makes an ensemble from its configuration: it has no model file, and its steps' models compute."""

from __future__ import annotations

from pathlib import Path

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import ENSEMBLE, ModelInterface
from halfserve.serve.engine.config.batching import batch_limits
from halfserve.serve.engine.config.model_config import DeclaredConfig, Defaults, read_config
from halfserve.serve.engine.config.parameters import check_own_parameters, drop_reported
from halfserve.serve.engine.ensembles.composition import EnsembleComposition
from halfserve.serve.engine.ensembles.ensemble_scheduler import EnsembleScheduler
from halfserve.serve.engine.ensembles.graph import dependency_order, ensemble_specs, read_graph, step_models
from halfserve.serve.engine.errors import ModelLoadError, UnmetStepsError
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.loaded_version import read_labels
from halfserve.serve.engine.repository.model_repository import CONFIG_FILE, ModelFiles, ModelRepository


def load_ensemble(files: ModelFiles, defaults: Defaults) -> Model:
    """Make the model of an ensemble, which is not yet connected to the models of its steps (`EnsembleComposition.connect`).

    May be called on any thread.

    Raises:
        ModelLoadError: the configuration is not an ensemble that can be computed; the message names step and tensor.
    """
    source = files.config.source
    check_own_parameters(files.config.message, source)
    config = ModelConfig()
    config.CopyFrom(files.config.message)
    if config.name not in {"", files.name}:
        raise ModelLoadError(
            f"{source}: name is {config.name!r}, expected the folder's name {files.name!r}; change it or leave it out"
        )
    config.name, config.platform = files.name, ENSEMBLE.platform
    drop_reported(config)
    graph = read_graph(config, source)
    inputs, outputs = ensemble_specs(config, source)
    model = Model(
        name=files.name,
        version=files.version,
        interface=ModelInterface(inputs=inputs, outputs=outputs, batched=config.max_batch_size > 0, kind=ENSEMBLE),
        config=config,
        backends=(),
        limits=batch_limits(config, defaults),
        labels=read_labels(files.config),
        path=files.model,
    )
    composition = EnsembleComposition(graph, config, source, files.version)
    model.composition = composition
    model.scheduler = EnsembleScheduler(composition, model.statistics)
    return model


def models_below(repository: ModelRepository, name: str, declared: DeclaredConfig | None = None) -> list[str]:
    """Return the models in a repository that an ensemble needs, each after its own dependencies; none for another model.

    Args:
        repository: the repository that has the ensemble.
        name: name of the ensemble.
        declared: its configuration, in place of the one in the repository.

    Raises:
        UnmetStepsError: an ensemble needs itself.
        ModelLoadError: a configuration cannot be read.
    """
    known = {name: step_models(declared.message if declared is not None else _config(repository, name))}
    if not known[name]:
        return []
    present = frozenset(repository.names())

    def steps(of: str) -> list[str]:
        if of not in known:
            known[of] = step_models(_config(repository, of)) if of in present else []
        return known[of]

    order, cycle = dependency_order([name], steps)
    if cycle:
        way = " -> ".join(map(repr, cycle))
        raise UnmetStepsError(f"{_config_file(repository, name)}: ensembles need each other: {way}; remove one of the steps")
    return [model for model in order if model != name and model in present]


def _config(repository: ModelRepository, name: str) -> ModelConfig:
    """Return a model's configuration; an empty one for a bare model file."""
    bare = repository.path_of(name).is_file()
    return ModelConfig() if bare else read_config(_config_file(repository, name)).message


def _config_file(repository: ModelRepository, name: str) -> Path:
    return repository.path_of(name) / name / CONFIG_FILE
