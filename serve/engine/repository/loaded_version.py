"""One version of a model, loaded from its files: all that is needed to serve it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from protos.model_config_pb2 import ModelConfig
from serve.engine.as_loaded import AsLoaded
from serve.engine.backend import Backend, ModelInterface, Placement, Runtime
from serve.engine.configuration.batching import batch_limits
from serve.engine.configuration.config import (
    DeclaredConfig,
    Defaults,
    client_interface,
    complete_config,
    instances,
)
from serve.engine.configuration.declared_outputs import declared_outputs
from serve.engine.configuration.own_parameters import check_own_parameters, drop_reported
from serve.engine.errors import ModelLoadError
from serve.engine.model import Model
from serve.engine.pauses import pause
from serve.engine.precision_guard.guard import PrecisionGuard
from serve.engine.precision_guard.loading import make_guard
from serve.engine.queueing.batch_limits import BatchLimits
from serve.engine.queueing.joining import Joining
from serve.engine.regular_files import read_regular_text
from serve.engine.repository.model_repository import ModelFiles
from serve.engine.repository.named_files import named_file


@dataclass(frozen=True, kw_only=True)
class LoadedVersion:
    """A model version that is ready to run and not served yet.

    Attributes:
        files: where it comes from.
        interface: as clients see it.
        config: completed.
        backends: the loaded copies.
        limits: the batching policy.
        labels: names of the classes of an output, by the output's name.
        guard: looks at what the model answers; None does not.
        reload: loads the copy of a number anew.
        short_s: seconds that short batches take, by their rows, where that has been tried; see `ShortBatches`.
        joining: whether requests may share batches; None where there are no rows to share.
    """

    files: ModelFiles
    interface: ModelInterface
    config: ModelConfig
    backends: Sequence[Backend]
    limits: BatchLimits
    labels: Mapping[str, Sequence[str]]
    guard: PrecisionGuard | None = None
    reload: Callable[[int], Backend] | None = None
    short_s: Mapping[int, float] = field(default_factory=dict)
    joining: Joining | None = None

    def model(self) -> Model:
        """The version with its queue and counters. Any thread may make it; from then on it is the event loop's."""
        return Model(
            name=self.files.name,
            version=self.files.version,
            interface=self.interface,
            config=self.config,
            backends=self.backends,
            limits=self.limits,
            labels=self.labels,
            path=self.files.model,
            guard=self.guard,
            reload=self.reload,
            short_s=self.short_s,
            joining=self.joining,
        )


def load_version(files: ModelFiles, runtime: Runtime, placement: Placement, defaults: Defaults) -> LoadedVersion:
    """Read, check and load one model version, with every copy that its configuration asks for. Any thread may do it.

    Raises:
        ModelLoadError: the file or its configuration cannot be used; the text says which and why.
    """
    check_own_parameters(files.config.message, files.config.source)
    as_loaded = AsLoaded.look(files.model)
    runtime = declared_outputs(runtime, files.config.message)
    interface = runtime.describe(files.model)
    as_loaded = as_loaded.also(files.model.parent / name for name in interface.data_files)
    config = complete_config(files.config, interface, name=files.name, defaults=defaults)
    drop_reported(config)
    copies = instances(config)
    places = [_place(placement, kind, device) for kind, device in copies]
    pause()
    backends = [runtime.load(files.model, interface, place, config) for place in places]
    config.parameters["halfserve.provider"].string_value = backends[0].provider
    config.parameters["halfserve.precision"].string_value = backends[0].precision
    pause()
    return LoadedVersion(
        files=files,
        interface=client_interface(config, interface),
        config=config,
        backends=backends,
        limits=batch_limits(config, defaults),
        labels=read_labels(files.config),
        guard=make_guard(
            files.model,
            runtime,
            places[0],
            label=f"{files.name}/{files.version}",
            interface=interface,
            config=config,
            source=files.config.source,
        ),
        reload=as_loaded.guarded(lambda number: runtime.load(files.model, interface, places[number], config)),
        joining=Joining(f"{files.name}/{files.version}") if config.max_batch_size else None,
    )


def load_model(files: ModelFiles, runtime: Runtime, placement: Placement, defaults: Defaults) -> Model:
    """`load_version` and its model, in one.

    Raises:
        ModelLoadError: the file or its configuration cannot be used; the text says which and why.
    """
    return load_version(files, runtime, placement, defaults).model()


def read_labels(declared: DeclaredConfig) -> dict[str, list[str]]:
    """The class names that a configuration's label files hold, one a line, by the output's name.

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
        # Not splitlines, for which a class's name can hold ends of lines, too: the names of all that follow would be others.
        labels[output.name] = text.removesuffix("\n").split("\n") if text else []
    return labels


def _place(placement: Placement, kind: str, device: int) -> Placement:
    use_gpu = placement.use_gpu and kind != "cpu"
    return replace(
        placement, use_gpu=use_gpu, require_gpu=use_gpu and (placement.require_gpu or kind == "gpu"), device_id=device
    )
