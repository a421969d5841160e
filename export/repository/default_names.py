"""Names that nobody chose: a model of that name which is there already may be another network altogether."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from export.errors import ExportError
from export.files.model_file import open_model

if TYPE_CHECKING:
    import onnx

    from export.files.model_file import ModelFile

FACTORY = "halfserve.model"


def require_same_network(repository: Path, name: str, source: ModelFile) -> None:
    """Check that a model which is about to get a default name is the network that has this name in the repository already.

    It is where both say which factory made them and it is the same one; else where their matrices have the same shapes, as they
    have after more training.

    Args:
        repository: The repository's folder; it need not exist.
        name: The default name.
        source: The float32 model.

    Raises:
        ExportError: It is another network.
    """
    existing = _latest(repository / name)
    if existing is None:
        return
    theirs, ours = _factory(existing), _factory(source.outline)
    if theirs != ours if theirs and ours else _shapes(existing) != _shapes(source.outline):
        made_from = f" made from {theirs}" if theirs else ""
        raise ExportError(
            f"{repository / name} holds another network{made_from}, and {name!r} is only this one's default name; give it a "
            f"name of its own with --name, or --name {name} to add it there as the next version"
        )


def _latest(folder: Path) -> onnx.ModelProto | None:
    """The outline of the newest version that can be read; None where there is none."""
    try:
        numbers = [int(entry.name) for entry in folder.iterdir() if entry.name.isascii() and entry.name.isdigit()]
    except OSError:
        return None
    for number in sorted(numbers, reverse=True):
        try:
            return open_model(folder / str(number) / "model.onnx").outline
        except ExportError:
            continue
    return None


def _factory(model: onnx.ModelProto) -> str:
    return next((entry.value for entry in model.metadata_props if entry.key == FACTORY), "")


def _shapes(model: onnx.ModelProto) -> set[tuple[int, ...]]:
    """Of vectors and numbers nothing: the conversion folds some, and adds some."""
    return {tuple(tensor.dims) for tensor in model.graph.initializer if len(tensor.dims) > 1}
