"""The preprocessing.json beside a model: by it, clients may send encoded pictures in place of pixels."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Final

from halfserve.protos.pictures import PREPROCESSING, PicturePreparation
from halfserve.serve.engine.backend import ModelInterface
from halfserve.serve.engine.config.parameters import TASK
from halfserve.serve.engine.disk_files import read_regular
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.repository.model_repository import ModelFiles, require_inside

logger = logging.getLogger(__name__)

# Of other models, a file of this name is something else.
PICTURE_TASKS: Final = frozenset({"image-classification", "image-embeddings"})
LACKING: Final = "the server lacks the package pillow; in a checkout of halfserve, run: pip install '.[pictures]'"


def read_pictures(files: ModelFiles, interface: ModelInterface) -> dict[str, PicturePreparation]:
    """How encoded pictures are prepared, by the name of the input that takes them; empty where none does.

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
