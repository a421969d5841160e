"""Find the models below a path, in Triton's layout or as a bare model file, and load them.

<repository>/<model>/config.pbtxt            optional
<repository>/<model>/<version>/model.onnx    version: a positive integer; model.pt2 for an exported torch program
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from protos.model_config_pb2 import ModelConfig
from serve.engine.as_loaded import AsLoaded
from serve.engine.backend import Backend, ModelInterface, Placement, Runtime
from serve.engine.batch_limits import BatchLimits
from serve.engine.batching import batch_limits
from serve.engine.config import (
    DeclaredConfig,
    Defaults,
    client_interface,
    complete_config,
    instances,
    read_config,
)
from serve.engine.errors import ModelLoadError
from serve.engine.joining import Joining
from serve.engine.model import Model
from serve.engine.model_kinds import KINDS, asked_kinds
from serve.engine.named_files import named_file, require_file_name, require_inside
from serve.engine.own_parameters import check_own_parameters
from serve.engine.pauses import pause
from serve.engine.precision_guard.guard import PrecisionGuard
from serve.engine.precision_guard.loading import make_guard

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.pbtxt"


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """One model version on disk.

    Attributes:
        name: the model folder's name, or the bare file's without its ending.
        version: the version folder's name; 1 for a bare file.
        model: the ONNX file.
        config: what the model folder's config.pbtxt says.
    """

    name: str
    version: int
    model: Path
    config: DeclaredConfig


def find_models(path: Path) -> list[ModelFiles]:
    """The model versions that should be served from `path`, by name and version.

    Args:
        path: a repository folder, or an .onnx file.

    Raises:
        ModelLoadError: there is nothing to serve at `path`, or a configuration cannot be read.
    """
    found = [files for name in model_names(path) for files in find_model(path, name)]
    if not found:
        raise ModelLoadError(
            f"{path}: no models in it; expected <model>/<version>/{KINDS[0].file_name}, with a version such as 1{_hint(path)}"
        )
    return found


def model_names(path: Path) -> list[str]:
    """The models that a repository folder holds, or the one that a bare model file is, whether they can be loaded or not.

    Raises:
        ModelLoadError: there is nothing at `path`, or it cannot be read.
    """
    if path.is_file():
        return [path.stem]
    if not path.is_dir():
        raise ModelLoadError(f"{path}: not found; expected a model repository folder or an .onnx file")
    try:
        folders = sorted(path.iterdir())
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
    return [folder.name for folder in folders if _is_model_folder(folder)]


def find_model(path: Path, name: str, declared: DeclaredConfig | None = None) -> list[ModelFiles]:
    """The versions of one model that should be served, oldest first.

    Args:
        path: a repository folder, or a bare model file.
        name: one of `model_names`.
        declared: a configuration to use in place of the model folder's config.pbtxt.

    Raises:
        ModelLoadError: no version is to be served, a configuration cannot be read, or something lies outside the repository.
    """
    if path.is_file():
        empty = DeclaredConfig(message=ModelConfig(), source=path, says_batch_size=False)
        return [ModelFiles(name=path.stem, version=1, model=path, config=declared or empty)]
    folder = path / name
    require_inside(path, folder)
    require_inside(path, folder / CONFIG_FILE)
    try:
        versions = _versions(folder, declared or read_config(folder / CONFIG_FILE))
    except OSError as error:
        raise ModelLoadError(f"{folder}: cannot be read: {error.strerror}") from None
    for files in versions:
        require_inside(path, files.model)
    return versions


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
    interface = runtime.describe(files.model)
    config = complete_config(files.config, interface, name=files.name, defaults=defaults)
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
            text = path.read_text(encoding="utf-8-sig")
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


def _hint(path: Path) -> str:
    if _version_folders(path):
        return f"; it looks like one model's own folder: serve {path.parent}"
    if any((path / kind.file_name).is_file() for kind in KINDS):
        return f"; it looks like one version's own folder: serve {path.parent.parent}"
    return ""


def _is_model_folder(folder: Path) -> bool:
    # A leading dot marks what a writer has not finished. What cannot be looked into is a model that is refused with the reason,
    # as is one that has a configuration and no version.
    try:
        if folder.name.startswith(".") or not folder.is_dir():
            return False
        return bool(_version_folders(folder)) or (folder / CONFIG_FILE).is_file()
    except OSError:
        return True


def _version_folders(folder: Path) -> dict[int, Path]:
    numbered = sorted((f for f in folder.iterdir() if f.name.isascii() and f.name.isdigit()), key=lambda f: -len(f.name))
    return {int(f.name): f for f in numbered if int(f.name) > 0 and f.is_dir()}  # of 1 and 01 the former counts


def _versions(folder: Path, declared: DeclaredConfig) -> list[ModelFiles]:
    names = _file_names(declared)
    present = {
        version: found
        for version, path in _version_folders(folder).items()
        if (found := next((path / name for name in names if (path / name).is_file()), None)) is not None
    }
    chosen = _chosen(declared.message, sorted(present))
    missing = sorted(set(declared.message.version_policy.specific.versions) - present.keys())
    if missing:
        logger.warning("%s: version_policy asks for versions that are not there: %s", folder, ", ".join(map(str, missing)))
    if not _version_folders(folder):
        raise ModelLoadError(f"{folder}: has no version; expected a folder with a number for a name, such as {folder / '1'}")
    if not chosen:
        raise ModelLoadError(f"{folder}: none of its version folders to be served holds {' or '.join(names)}")
    return [ModelFiles(name=folder.name, version=v, model=present[v], config=declared) for v in chosen]


def _file_names(declared: DeclaredConfig) -> list[str]:
    """What the model file of a version may be called, the first that is there counts."""
    name = declared.message.default_model_filename
    require_file_name(name, f"{declared.source}: default_model_filename is")
    # A configuration that asks for what is not served is refused once the file has been read, with a better text.
    return [name] if name else [kind.file_name for kind in asked_kinds(declared.message) or KINDS]


def _chosen(config: ModelConfig, versions: Sequence[int]) -> Sequence[int]:
    """What the version policy picks: the latest one unless it says otherwise."""
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return versions
        case "specific":
            return [v for v in versions if v in policy.specific.versions]
        case _:
            return versions[-max(1, policy.latest.num_versions) :]
