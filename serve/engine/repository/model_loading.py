"""Loads a model version from its files, and starts it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from halfserve.protos.datatypes import BY_CONFIG
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.protos.pictures import PREPROCESSING, PicturePreparation
from halfserve.serve.engine.backend import ENSEMBLE, ONNX, PYTHON, DevicePlacement, ModelInterface, ModelKind, Runtime
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.config.batching import batch_limits
from halfserve.serve.engine.config.instance_groups import complete_groups, load_copies
from halfserve.serve.engine.config.model_config import (
    DeclaredConfig,
    Defaults,
    client_interface,
    complete_config,
)
from halfserve.serve.engine.config.parameters import TASK, check_own_parameters, drop_reported
from halfserve.serve.engine.config.sequence_batching import SequencePlan
from halfserve.serve.engine.cuda_driver import device_count
from halfserve.serve.engine.disk_files import UnchangedFiles, read_regular, read_regular_text
from halfserve.serve.engine.ensembles.composition import EnsembleComposition
from halfserve.serve.engine.ensembles.graph import dependency_order, ensemble_specs, read_graph, step_models
from halfserve.serve.engine.ensembles.run import EnsembleScheduler
from halfserve.serve.engine.errors import ModelLoadError, UnmetStepsError
from halfserve.serve.engine.execution.batch_invariance import BatchInvariance
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.padding.ragged import ragged_interface, read_ragged
from halfserve.serve.engine.pictures.encoded_inputs import LACKING
from halfserve.serve.engine.precision_guard.loading import make_guard
from halfserve.serve.engine.repository.model_repository import (
    CONFIG_FILE,
    ModelFiles,
    ModelRepository,
    named_file,
    require_inside,
)
from halfserve.serve.engine.repository.runtime_views import batch_first, declared_outputs, with_constants
from halfserve.serve.engine.resource_limits import usable_cores
from halfserve.serve.engine.sequences.sequence_loading import client_view, read_plan, sequence_scheduler
from halfserve.serve.engine.tensors import ANY_SIZE, TensorSpec
from halfserve.serve.engine.whole_requests import DecoupledRequests, WholeRequests

STATE_FOLDER = "initial_state"  # folder in the model's folder with the files that sequence_batching names
logger = logging.getLogger(__name__)

# Of other models, a file of this name is something else.
PICTURE_TASKS: Final = frozenset({"image-classification", "image-embeddings"})


@dataclass(frozen=True)
class OwnDeclaration:
    """The declaration of a model whose interface is in its configuration, and not in its file.

    Attributes:
        config: the configuration, with the additions of the model itself.
        interface: the declared interface.
        has_rows: whether batches join the rows of requests, as they do for models whose files describe themselves.
    """

    config: DeclaredConfig
    interface: ModelInterface
    has_rows: bool = False


def declared_interface(declared: DeclaredConfig, kind: ModelKind) -> ModelInterface:
    """Return the interface that a configuration declares, of a model whose file does not describe itself.

    Raises:
        ModelLoadError: an input or output has no datatype.
    """
    batched = declared.message.max_batch_size > 0

    def spec(entry: Any, what: str) -> TensorSpec:
        datatype = BY_CONFIG.get(entry.data_type)
        if datatype is None:
            raise ModelLoadError(f"{declared.source}: {what} {entry.name!r} has no data_type, expected one such as TYPE_FP32")
        dims = entry.reshape.shape if entry.HasField("reshape") else entry.dims
        shape = ((ANY_SIZE,) if batched else ()) + tuple(dims)
        # Outputs do not have the field `optional`.
        return TensorSpec(name=entry.name, datatype=datatype, shape=shape, optional=getattr(entry, "optional", False))

    return ModelInterface(
        inputs=tuple(spec(entry, "input") for entry in declared.message.input),
        outputs=tuple(spec(entry, "output") for entry in declared.message.output),
        batched=batched,
        kind=kind,
    )


@runtime_checkable
class DeclaringRuntime(Protocol):
    """A runtime for models that are described by a configuration instead of their file."""

    def declared(self, path: Path, config: DeclaredConfig, name: str) -> OwnDeclaration | None:
        """Return configuration and interface of the model `name`; None if its file describes itself.

        Raises:
            ModelLoadError: the model cannot be used.
        """


def load_version(files: ModelFiles, runtime: Runtime, placement: DevicePlacement, defaults: Defaults) -> Model:
    """Read, check and load one model version, with every copy that its configuration asks for; it is not started yet.

    May be called on any thread. Padding is not proved, so that the model pads nothing.

    Raises:
        ModelLoadError: the file or its configuration cannot be used; the message names it and the reason.
    """
    check_own_parameters(files.config.message, files.config.source)
    as_loaded = UnchangedFiles.look(files.model)
    own = runtime.declared(files.model, files.config, files.name) if isinstance(runtime, DeclaringRuntime) else None
    if own is None:
        runtime = with_constants(runtime, files.config.message, files.config.source)
        runtime = batch_first(declared_outputs(runtime, files.config.message), files.config)
        interface = runtime.describe(files.model)
    else:
        files, interface = replace(files, config=own.config), own.interface
    as_loaded = as_loaded.also(files.model.parent / name for name in interface.data_files)
    ragged = None if own else read_ragged(files.config.message, interface, str(files.config.source))
    shown = ragged_interface(files.config.message, client_view(files.config.message, interface), ragged)
    config = complete_config(files.config, shown, name=files.name, defaults=defaults)
    has_rows = (own is None or own.has_rows) and ragged is None  # whether requests have rows that batches join
    drop_reported(config)
    groups = complete_groups(config, placement, device_count())
    copies = sum(group.copies for group in groups)
    _plan(files.config, config, interface, copies)  # refuses a plan before the copies are loaded
    pause()
    at_once = usable_cores() if interface.kind is PYTHON else 1  # its copies are processes that do their own work
    backends, places = load_copies(
        groups, placement, lambda place: runtime.load(files.model, interface, place, config), at_once=at_once
    )
    sequences = _plan(files.config, config, interface, copies)
    config.parameters["halfserve.provider"].string_value = backends[0].provider
    config.parameters["halfserve.precision"].string_value = backends[0].precision
    pause()
    seen = client_interface(config, shown)
    label, source = f"{files.name}/{files.version}", files.config.source
    guard = None
    if has_rows:
        guard = make_guard(files.model, runtime, places[0], label=label, interface=interface, config=config, source=source)
    return Model(
        name=files.name,
        version=files.version,
        path=files.model,
        declared=files.config,
        interface=seen,
        config=config,
        backends=backends,
        limits=batch_limits(config, defaults),
        labels=read_labels(files.config),
        # Several threads decode, which would change the order of a sequence's requests.
        pictures={} if sequences is not None else read_pictures(files, seen),
        guard=guard,
        reload=as_loaded.guarded(lambda number: runtime.load(files.model, interface, places[number], config)),
        invariance=BatchInvariance(label) if config.max_batch_size and has_rows else None,
        sequences=sequences,
        ragged=ragged,
    )


def _plan(declared: DeclaredConfig, config: ModelConfig, interface: ModelInterface, copies: int) -> SequencePlan | None:
    """Return how the sequences of a model run; None for a model without sequences."""
    if not config.HasField("sequence_batching"):
        return None
    return read_plan(declared, config, interface, copies, lambda *named: _read_state(declared, *named))


def load_model(files: ModelFiles, runtime: Runtime, placement: DevicePlacement, defaults: Defaults) -> Model:
    """Load a version and start it, without trying it out.

    Raises:
        ModelLoadError: see `load_version`.
    """
    return started(load_version(files, runtime, placement, defaults))


def started(model: Model) -> Model:
    """Start a loaded model, and give it the schedulers that its configuration asks for. May be called on any thread."""
    model.start()
    if model.sequences is not None:
        model.scheduler = sequence_scheduler(model, model.sequences)
    elif model.interface.kind is PYTHON:
        # Batch only if the configuration asks for it, as Triton does.
        one_by_one = not model.config.HasField("dynamic_batching")
        model.scheduler = WholeRequests(model.name, model.batcher, model.statistics, one_by_one=one_by_one)
    else:
        return model
    if model.is_decoupled:  # it may answer as often as it wants
        model.scheduler = DecoupledRequests(model.name, model.scheduler, model.statistics)
    return model


def read_labels(declared: DeclaredConfig) -> dict[str, list[str]]:
    """Read the class names in a configuration's label files, one per line, by the output's name.

    Raises:
        ModelLoadError: a file is missing, unreadable, not beside the configuration, or a link out of the repository.
    """
    labels = {}
    for output in declared.message.output:
        name = output.label_filename
        if not name:
            continue
        path = named_file(declared, name, f"{declared.source}: label_filename is")
        try:
            text = read_regular_text(path, "utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ModelLoadError(f"{declared.source}: cannot read the labels {name!r}: {reason}") from None
        # splitlines is not used: a class name may hold other line separators, and all following names would shift.
        labels[output.name] = text.removesuffix("\n").split("\n") if text else []
    return labels


def _read_state(declared: DeclaredConfig, name: str, what: str) -> bytes:
    path = named_file(declared, name, what, folder=STATE_FOLDER)
    try:
        return read_regular(path)
    except OSError as error:
        raise ModelLoadError(f"{what} {name!r}: cannot read {STATE_FOLDER}/{name}: {error.strerror}") from None


def read_pictures(files: ModelFiles, interface: ModelInterface) -> dict[str, PicturePreparation]:
    """Return how encoded pictures are prepared, by the name of the input that takes them; empty where none does.

    Raises:
        ModelLoadError: the file is unreadable, a link out of the repository, or does not fit the model.
    """
    path = files.model.parent / PREPROCESSING
    if files.config.message.parameters[TASK].string_value not in PICTURE_TASKS or not path.exists():
        return {}
    require_inside(files.model.parent.parent.parent, path)
    try:
        preparation = PicturePreparation.from_bytes(read_regular(path))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelLoadError(f"{path}: {error}; export the model again") from None
    rows = (preparation.height, preparation.width, 3)
    taking = [spec.name for spec in interface.inputs if spec.datatype.wire == "UINT8" and spec.shape == (-1, *rows)]
    if len(taking) != 1:
        raise ModelLoadError(f"{path}: makes pixels of shape {list(rows)}, which {len(taking)} inputs take, expected 1")
    if find_spec("PIL") is None:
        label = f"{files.name}/{files.version}"
        logger.warning("%s: takes no encoded pictures: %s", label, LACKING, extra={"model": label})
    return {taking[0]: preparation}


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
        declared=files.config,
    ).start()
    composition = EnsembleComposition(graph, config, source, files.version)
    model.composition = composition
    model.scheduler = EnsembleScheduler(composition, model.statistics)
    return model


def models_below(repository: ModelRepository, name: str, declared: DeclaredConfig | None = None) -> list[str]:
    """Return the models in a repository that an ensemble needs, each after its own dependencies; none for another model.

    `declared`: configuration of the ensemble `name`, in place of the one in the repository.

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


def warms_up_code(repository: ModelRepository, name: str) -> bool:
    """Return whether the configuration of a model asks for requests to its code at the load (`model_warmup`)."""
    try:
        config = _config(repository, name)
    except ModelLoadError:  # loading it reports the error
        return False
    return bool(config.model_warmup) and (config.backend or config.platform) not in ONNX.names


def _config(repository: ModelRepository, name: str) -> ModelConfig:
    """Return a model's configuration; an empty one for a bare model file."""
    bare = repository.path_of(name).is_file()
    return ModelConfig() if bare else repository.config(name).message


def _config_file(repository: ModelRepository, name: str) -> Path:
    return repository.path_of(name) / name / CONFIG_FILE
