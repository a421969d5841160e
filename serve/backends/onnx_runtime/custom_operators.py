"""Libraries of custom operators, which a configuration names: `model_operations { op_library_filename: "..." }`.

The package onnxruntime-extensions (tokenizers, text operators, image decoders) is referred to by its name and is trusted like
any installed package. A file in the repository can run any code as the server's user once it is loaded, so it needs an option.
"""

from __future__ import annotations

from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.config.model_config import OPERATOR_PACKAGES
from halfserve.serve.engine.disk_files import require_regular
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.repository.model_repository import require_file_name, require_inside

TRUST_OPTION = "--trust-custom-operators"
PACKAGE = "onnxruntime_extensions"
LIBRARY = "_extensions_pydll"  # name of the library in the package
FOLDERS = 3  # number of folders to search: a version's, the fp32 twin's below it, and the model's above


def operator_libraries(config: ModelConfig, path: Path, *, trusted: bool) -> tuple[str, ...]:
    """Return the paths of the libraries that a model's sessions register, from the folder of its version or of its model.

    `trusted`: whether libraries of the repository may be loaded. Raises ModelLoadError: see `library_path`; or the package is
    not installed.
    """
    return tuple(_library(name, path, trusted=trusted) for name in config.model_operations.op_library_filename)


def _library(name: str, path: Path, *, trusted: bool) -> str:
    if name in OPERATOR_PACKAGES:
        found = packaged_library()
        if found is None:
            raise ModelLoadError(
                f"{path}: needs the operators of onnxruntime-extensions, which is not installed; "
                "in a checkout of halfserve, pip install '.[extensions]'"
            )
        return found
    hint = f". The package {PACKAGE!r} needs no option"
    return library_path(name, path, "model_operations", trusted=trusted, hint=hint)


def library_path(name: str, path: Path, setting: str, *, trusted: bool, hint: str = "") -> str:
    """Return the path of a library in a version's folder, or in its model's; `setting` is the setting that names it.

    Raises ModelLoadError: the library is not trusted (the text ends in `hint`), not there, or not in the model's folder.
    """
    if not trusted:
        raise ModelLoadError(
            f"{path}: {setting} names the library {name!r}, which can run any code as the server's user when it is "
            f"loaded; start the server with {TRUST_OPTION} if you trust everybody who writes files there{hint}"
        )
    require_file_name(name, f"{path}: {setting} is")
    folders = path.absolute().parents[:FOLDERS]
    library = next((folder / name for folder in folders if (folder / name).exists()), None)
    if library is None:
        raise ModelLoadError(f"{path}: the library {name!r} of {setting} is not in the model's folder; copy it there")
    require_inside(folders[-1], library)
    try:
        require_regular(library)
    except OSError as error:
        raise ModelLoadError(f"{path}: the library {name!r} cannot be read: {error.strerror}") from None
    return str(library)


@cache
def packaged_library() -> str | None:
    """Return the path of the package's library; None if it is not installed."""
    # The library is found without import: the package would import torch, and make later processes use protobuf's slow version.
    package = PathFinder.find_spec(PACKAGE)
    module = PathFinder.find_spec(LIBRARY, package.submodule_search_locations) if package else None
    return module.origin if module else None


def stamp(library: str) -> str:
    """Return a text that changes when a library changes; "" if it is gone."""
    try:
        status = Path(library).stat()
    except OSError:
        return ""
    return f"{library} {status.st_size} {status.st_mtime_ns}"
