"""What a served version was made of, so that a reload leaves alone what has not changed."""

from __future__ import annotations

from dataclasses import dataclass

from serve.control.fingerprint import Fingerprint, fingerprint
from serve.engine.repository.model_repository import ModelFiles


@dataclass(frozen=True, kw_only=True)
class MadeOf:
    """Equal for two looks at the same files.

    Attributes:
        version: the files of the version's folder.
        beside: the files of the model's folder: configuration, labels.
        config: that was used, which may have come with a load request.
    """

    version: Fingerprint
    beside: Fingerprint
    config: bytes


def made_of(files: ModelFiles, *, bare: bool) -> MadeOf:
    """Look at a version's files.

    Args:
        files: the version.
        bare: the model is a file without a folder of its own.
    """
    folder = files.config.source.parent
    beside = () if bare else tuple(entry for path in sorted(folder.iterdir()) if path.is_file() for entry in fingerprint(path))
    return MadeOf(
        version=fingerprint(files.model if bare else files.model.parent),
        beside=beside,
        config=files.config.message.SerializeToString(deterministic=True),
    )
