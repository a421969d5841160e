"""Files that a configuration names, and links: what a model reads lies in its repository."""

from __future__ import annotations

from pathlib import Path

from serve.engine.configuration.config import DeclaredConfig
from serve.engine.errors import ModelLoadError


def require_file_name(name: str, what: str) -> None:
    """Check that a name is that of a file alone.

    Args:
        name: as a configuration has it.
        what: of whom it is, as the beginning of an error's text: "config.pbtxt: label_filename is".

    Raises:
        ModelLoadError: it leads into another folder, or no file can be called so.
    """
    if Path(name).name != name or "\0" in name:
        raise ModelLoadError(f"{what} {name!r}, expected a file name without folders or NUL characters")


def named_file(declared: DeclaredConfig, name: str, what: str, *, folder: str = "") -> Path:
    """A file that a configuration names, in the folder of its model.

    Args:
        declared: the configuration.
        name: of the file.
        what: of whom it is, as the beginning of an error's text: "config.pbtxt: label_filename is".
        folder: in the model's, where the file lies.

    Raises:
        ModelLoadError: the name leads elsewhere, or a link does so.
    """
    require_file_name(name, what)
    model_folder = declared.source.parent
    path = model_folder / folder / name
    require_inside(model_folder.parent, path)
    return path


def require_inside(root: Path, path: Path) -> None:
    """Check that a path is inside a folder once every link in it is followed.

    Raises:
        ModelLoadError: it is not.
    """
    try:
        is_inside = path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # which of them depends on Python
        raise ModelLoadError(f"{path}: is a link that leads to itself, expected what lies in the repository") from None
    if not is_inside:
        raise ModelLoadError(f"{path}: is a link out of the repository, expected what lies in it; copy it there")
