"""Finds the models below a path, in Triton's layout or as a bare model file.

<repository>/<model>/config.pbtxt            optional
<repository>/<model>/<version>/model.onnx    version: a positive integer; model.xml for OpenVINO, model.pt2 for an exported
                                             torch program; or a folder of that name, with a model.onnx and its data files
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import KINDS, ONNX, asked_kinds
from halfserve.serve.engine.config.model_config import DeclaredConfig, read_config, require_served
from halfserve.serve.engine.ensembles.graph import is_ensemble
from halfserve.serve.engine.errors import ModelLoadError

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.pbtxt"
CONFIGS_FOLDER = "configs"  # has further configurations, which --model-config-name selects


def require_file_name(name: str, what: str) -> None:
    """Check that a name is a plain file name. `what` begins the error text: "config.pbtxt: label_filename is".

    Raises:
        ModelLoadError: the name leads into another folder, or is not a valid file name.
    """
    if Path(name).name != name or "\0" in name:
        raise ModelLoadError(f"{what} {name!r}, expected a file name without folders or NUL characters")


def named_file(declared: DeclaredConfig, name: str, what: str, *, folder: str = "") -> Path:
    """Return the path of a file that a configuration names, in its model's folder or in `folder` below. `what` begins the error
    text.

    Raises:
        ModelLoadError: the name or a link leads elsewhere.
    """
    require_file_name(name, what)
    model_folder = declared.model_folder
    path = model_folder / folder / name
    require_inside(model_folder.parent, path)
    return path


def require_inside(root: Path, path: Path) -> None:
    """Check that a path, with all links resolved, is inside a folder.

    Raises:
        ModelLoadError: the path is outside.
    """
    try:
        is_inside = path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # the class depends on the Python version
        raise ModelLoadError(f"{path}: is a link that leads to itself, expected what lies in the repository") from None
    if not is_inside:
        raise ModelLoadError(f"{path}: is a link out of the repository, expected what lies in it; copy it there")


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """One model version on disk.

    Attributes:
        name: name of the model folder, or of the bare file without its suffix.
        version: number of the version folder; 1 for a bare file.
        model: path of the model file; for an ensemble, of its configuration.
        config: configuration from the model folder's config.pbtxt.
    """

    name: str
    version: int
    model: Path
    config: DeclaredConfig


def find_models(path: Path) -> list[ModelFiles]:
    """Return the model versions that should be served from `path`, a repository folder or .onnx file, by name and version.

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
    """Return the names of the models in a repository folder, loadable or not, or of a bare model file.

    Raises:
        ModelLoadError: `path` does not exist or cannot be read.
    """
    try:
        if path.is_file():
            if not _is_text(path.stem):
                raise ModelLoadError(f"{str(path)!a}: the model's name is not UTF-8: no client can ask for it; rename the file")
            return [path.stem]
        if not path.is_dir():
            raise ModelLoadError(f"{path}: not found; expected a model repository folder or an .onnx file")
        folders = sorted(path.iterdir())
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None
    models = [folder for folder in folders if _is_model_folder(folder)]
    for folder in models:
        if not _is_text(folder.name):
            _warn_of_name(folder)
    return [folder.name for folder in models if _is_text(folder.name)]


def find_model(path: Path, name: str, declared: DeclaredConfig | None = None, config_name: str = "") -> list[ModelFiles]:
    """Return the versions of one of `model_names` that should be served, oldest first.

    `declared` is a configuration in place of the model folder's config.pbtxt; see also `config_of`.

    Raises:
        ModelLoadError: no version is to be served, a configuration cannot be read, or a path leads out of the repository.
    """
    if path.is_file():
        empty = DeclaredConfig(message=ModelConfig(), source=path, says_batch_size=False)
        return [ModelFiles(name=path.stem, version=1, model=path, config=declared or empty)]
    folder = path / name
    require_inside(path, folder)
    require_inside(path, config_file(folder, config_name))
    try:
        versions = _versions(folder, declared or config_of(folder, config_name))
    except OSError as error:
        raise ModelLoadError(f"{folder}: cannot be read: {error.strerror}") from None
    for files in versions:
        require_inside(path, files.model)
    return versions


def config_file(folder: Path, config_name: str) -> Path:
    """Return the path of a model's configuration: configs/<config_name>.pbtxt where that is there, else config.pbtxt."""
    custom = folder / CONFIGS_FOLDER / f"{config_name}.pbtxt"
    return custom if config_name and custom.is_file() else folder / CONFIG_FILE


def config_of(folder: Path, config_name: str) -> DeclaredConfig:
    """Read the configuration of `config_file`.

    Raises:
        ModelLoadError: see `read_config`.
    """
    return replace(read_config(config_file(folder, config_name)), folder=folder)


class ModelRepository:
    """The models below one or several paths, each of which is a repository folder or a bare model file.

    Attributes:
        paths: paths of the repositories, in the order of precedence.
    """

    def __init__(self, *paths: Path, config_name: str = "", needs_config: bool = False) -> None:
        """`config_name`: see `config_file`; `needs_config`: whether configurations must be complete."""
        self.paths = paths
        self._needs_config = needs_config
        self._config_name = config_name

    def __str__(self) -> str:
        return ", ".join(map(str, self.paths))

    def names(self) -> list[str]:
        """Return the names of the models, loadable or not, each once.

        Raises:
            ModelLoadError: a path does not exist or cannot be read.
        """
        return sorted({name for path in self.paths for name in model_names(path)})

    def having(self, name: str) -> list[Path]:
        """Return the paths that have a model of this name; it can be served only if it is in one of them."""
        return [path for path in self.paths if (path.stem == name if path.is_file() else _is_model_folder(path / name))]

    def path_of(self, name: str) -> Path:
        """Return the first path that has a model; the first path of all if none has it."""
        return next(iter(self.having(name)), self.paths[0])

    def find(self, name: str, declared: DeclaredConfig | None = None) -> list[ModelFiles]:
        """Return the versions of a model that should be served; see `find_model`.

        Raises:
            ModelLoadError: several paths have the model; see also `find_model`.
        """
        having = self.having(name)
        if len(having) > 1:
            raise ModelLoadError(
                f"model {name!r} is in {len(having)} model repositories ({ModelRepository(*having)}), expected it in one; "
                "remove or rename the others"
            )
        found = find_model(self.path_of(name), name, declared, self._config_name)
        if self._needs_config:
            require_complete(found[0].config)
        return found

    def config(self, name: str) -> DeclaredConfig:
        """Read the configuration of a model that has a folder.

        Raises:
            ModelLoadError: see `read_config`.
        """
        return config_of(self.path_of(name) / name, self._config_name)


def require_complete(declared: DeclaredConfig) -> None:
    """Check that a configuration says what would otherwise be read from the model.

    Raises:
        ModelLoadError: it names no platform or backend, or no inputs or outputs with datatypes.
    """
    message = declared.message
    missing = [] if message.platform or message.backend else ["platform or backend"]
    for kind, entries in (("input", message.input), ("output", message.output)):
        if not entries or not all(entry.data_type and entry.dims for entry in entries):
            missing.append(f"{kind} with data_type and dims")
    if missing:
        raise ModelLoadError(
            f"{declared.source}: has no {', no '.join(missing)}, which --require-config wants; write them down"
        )


def versions_to_serve(declared: DeclaredConfig, contents: Mapping[int, Collection[str]]) -> list[int]:
    """Return the versions that a configuration selects, before they are on this disk.

    `contents`: names of the files and folders in each version's folder. A folder without a model file is not a version yet.
    """
    if is_ensemble(declared.message):
        return []
    names = _file_names(declared)
    present = sorted(version for version, entries in contents.items() if any(name in entries for name in names))
    return list(_chosen(declared.message, present))


def _hint(path: Path) -> str:
    if _version_folders(path):
        return f"; it looks like one model's own folder: serve {path.parent}"
    if any((path / kind.file_name).is_file() for kind in KINDS):
        return f"; it looks like one version's own folder: serve {path.parent.parent}"
    return ""


def _is_text(name: str) -> bool:
    """Return whether messages, metrics and JSON can hold the name; otherwise it would fail all listings of models."""
    return not any("\ud800" <= character <= "\udfff" for character in name)


@cache
def _warn_of_name(folder: Path) -> None:
    # The warning is logged once, because with --model-control poll the folder is scanned repeatedly.
    logger.warning("%a: is passed over: its name is not UTF-8, so no client can ask for it; rename it", str(folder))


@cache
def _warn_of_zeros(folder: Path) -> None:
    logger.warning("%s: is passed over: a version's number has no leading zeros; rename it", folder)


def _is_model_folder(folder: Path) -> bool:
    # A leading dot marks an unfinished folder. Unreadable folders, and folders with a configuration and no version, count as
    # models, so that loading them reports the reason.
    try:
        if folder.name.startswith(".") or not folder.is_dir():
            return False
        return bool(_version_folders(folder)) or (folder / CONFIG_FILE).is_file()
    except OSError:
        return True


def _version_folders(folder: Path) -> dict[int, Path]:
    numbered = [f for f in folder.iterdir() if f.name.isascii() and f.name.isdigit() and f.is_dir()]
    for passed_over in numbered:
        if passed_over.name.startswith("0"):
            _warn_of_zeros(passed_over)
    return {int(f.name): f for f in numbered if not f.name.startswith("0")}


def _versions(folder: Path, declared: DeclaredConfig) -> list[ModelFiles]:
    if is_ensemble(declared.message):
        return _ensemble_versions(folder, declared)
    names = _file_names(declared)
    present = {
        version: found
        for version, path in _version_folders(folder).items()
        if (found := next((file for name in names for file in _places(path / name) if file.is_file()), None)) is not None
    }
    chosen = _chosen(declared.message, sorted(present))
    missing = sorted(set(declared.message.version_policy.specific.versions) - present.keys())
    if missing and chosen:
        logger.warning("%s: version_policy asks for versions that are not there: %s", folder, ", ".join(map(str, missing)))
    if not chosen:
        require_served(declared)  # raises an error if the files are of an unsupported kind
    if not _version_folders(folder):
        raise ModelLoadError(f"{folder}: has no version; expected a folder with a number for a name, such as {folder / '1'}")
    if present and not chosen and not _version_folders(folder).keys() & set(missing):
        raise ModelLoadError(
            f"{folder}: version_policy asks for {', '.join(map(str, missing)) or 'no version'}, expected one of those that are "
            f"there: {', '.join(map(str, sorted(present)))}"
        )
    if not chosen:
        raise ModelLoadError(f"{folder}: none of its version folders to be served holds {' or '.join(names)}")
    return [ModelFiles(name=folder.name, version=v, model=present[v], config=declared) for v in chosen]


def _ensemble_versions(folder: Path, declared: DeclaredConfig) -> list[ModelFiles]:
    """Return the versions of an ensemble, which needs no version folder; Triton wants one, which may be empty."""
    present = sorted(_version_folders(folder)) if folder.is_dir() else []
    chosen = _chosen(declared.message, present or [1])
    if not chosen:
        known = ", ".join(map(str, present or [1]))
        raise ModelLoadError(f"{folder}: version_policy asks for versions that are not there, expected some of {known}")
    return [ModelFiles(name=folder.name, version=v, model=declared.source, config=declared) for v in chosen]


def _places(path: Path) -> tuple[Path, ...]:
    """Return the possible paths of a model file: as in Triton, also in a folder of its name, beside its data files."""
    return path, path / ONNX.file_name


def _file_names(declared: DeclaredConfig) -> list[str]:
    """Return the names that a version's model file may have; the first one found is used."""
    name = declared.message.default_model_filename
    require_file_name(name, f"{declared.source}: default_model_filename is")
    # A configuration of an unsupported kind is refused later, with a better message.
    return [name] if name else [kind.file_name for kind in asked_kinds(declared.message) or KINDS]


def _chosen(config: ModelConfig, versions: Sequence[int]) -> Sequence[int]:
    """Return the versions that the version policy selects: by default the latest."""
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return versions
        case "specific":
            return [v for v in versions if v in policy.specific.versions]
        case _:
            return versions[-max(1, policy.latest.num_versions) :]
