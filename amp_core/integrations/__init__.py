"""Precision plugins for other training frameworks."""

from __future__ import annotations


def not_installed(error: ModuleNotFoundError, package: str, minimum: str) -> ImportError:
    """Return the error to raise from a failed import of a framework, of version `minimum` or later, with the command to install
    it.

    If another module than the framework is missing, it is `error` itself.
    """
    if (error.name or "").split(".")[0] != package:
        return error
    return ImportError(f"this integration needs {package}, which is not installed: pip install '{package}>={minimum}'")
