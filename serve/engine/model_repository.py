"""Find the models below a path, in Triton's layout or as a bare ONNX file, and load them.

<repository>/<model>/config.pbtxt            optional
<repository>/<model>/<version>/model.onnx    version: a positive integer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from protos.model_config_pb2 import ModelConfig
from serve.engine.backend import Placement, Runtime
from serve.engine.config import (
    DeclaredConfig,
    Defaults,
    batch_limits,
    client_interface,
    complete_config,
    instances,
    read_config,
)
from serve.engine.errors import ModelLoadError
from serve.engine.model import Model

CONFIG_FILE = "config.pbtxt"
MODEL_FILE = "model.onnx"


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
    if path.is_file():
        declared = DeclaredConfig(message=ModelConfig(), source=path, says_batch_size=False)
        return [ModelFiles(name=path.stem, version=1, model=path, config=declared)]
    if not path.is_dir():
        raise ModelLoadError(f"{path}: not found; expected a model repository folder or an .onnx file")
    found = [files for folder in sorted(path.iterdir()) if _is_model_folder(folder) for files in _versions(folder)]
    if not found:
        one_model = f"; it looks like one model's own folder: serve {path.parent}" if _version_folders(path) else ""
        raise ModelLoadError(
            f"{path}: no models in it; expected <model>/<version>/{MODEL_FILE}, with a version such as 1{one_model}"
        )
    return found


def load_model(files: ModelFiles, runtime: Runtime, placement: Placement, defaults: Defaults) -> Model:
    """Read, check and load one model version, with every copy that its configuration asks for.

    Raises:
        ModelLoadError: the file or its configuration cannot be used; the text says which and why.
    """
    interface = runtime.describe(files.model)
    config = complete_config(files.config, interface, name=files.name, defaults=defaults)
    copies = instances(config)
    backends = [runtime.load(files.model, interface, _place(placement, kind, device)) for kind, device in copies]
    config.parameters["halfserve.provider"].string_value = backends[0].provider
    config.parameters["halfserve.precision"].string_value = backends[0].precision
    return Model(
        name=files.name,
        version=files.version,
        interface=client_interface(config, interface),
        config=config,
        backends=backends,
        limits=batch_limits(config, defaults),
        labels=read_labels(files.config),
    )


def read_labels(declared: DeclaredConfig) -> dict[str, list[str]]:
    """The class names that a configuration's label files hold, one a line, by the output's name.

    Raises:
        ModelLoadError: a file is missing, unreadable, or not beside the configuration.
    """
    labels = {}
    for output in declared.message.output:
        name = output.label_filename
        if not name:
            continue
        if Path(name).name != name:
            raise ModelLoadError(f"{declared.source}: label_filename is {name!r}, expected a file name without folders")
        try:
            labels[output.name] = (declared.source.parent / name).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ModelLoadError(f"{declared.source}: cannot read the labels {name!r}: {reason}") from None
    return labels


def _place(placement: Placement, kind: str, device: int) -> Placement:
    use_gpu = placement.use_gpu and kind != "cpu"
    return replace(
        placement, use_gpu=use_gpu, require_gpu=use_gpu and (placement.require_gpu or kind == "gpu"), device_id=device
    )


def _is_model_folder(folder: Path) -> bool:
    # A leading dot marks what a writer has not finished.
    return folder.is_dir() and not folder.name.startswith(".") and bool(_version_folders(folder))


def _version_folders(folder: Path) -> dict[int, Path]:
    return {
        int(f.name): f for f in folder.iterdir() if f.name.isascii() and f.name.isdigit() and int(f.name) > 0 and f.is_dir()
    }


def _versions(folder: Path) -> list[ModelFiles]:
    declared = read_config(folder / CONFIG_FILE)
    file_name = declared.message.default_model_filename or MODEL_FILE
    if Path(file_name).name != file_name:
        raise ModelLoadError(
            f"{declared.source}: default_model_filename is {file_name!r}, expected a file name without folders"
        )
    present = {version: path / file_name for version, path in _version_folders(folder).items() if (path / file_name).is_file()}
    chosen = _chosen(declared.message, sorted(present))
    if not chosen:
        raise ModelLoadError(f"{folder}: none of its version folders to be served holds {file_name}")
    return [ModelFiles(name=folder.name, version=v, model=present[v], config=declared) for v in chosen]


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
