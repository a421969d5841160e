"""Python imports this first: a program of a document can import timm and torchvision, as its reader's can."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder


class _BesideCpuTorch(MetaPathFinder):
    """Declares the missing operators before either is found."""

    def find_spec(self, name: str, *_: object) -> None:
        if name in ("timm", "torchvision"):
            sys.meta_path.remove(self)
            from tests.torchvision_on_cpu import declared_operators  # noqa: PLC0415  (which imports torch)

            declared_operators()


sys.meta_path.insert(0, _BesideCpuTorch())
