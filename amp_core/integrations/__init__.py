"""Precision plugins for other training frameworks."""

from __future__ import annotations


def not_installed(error: ModuleNotFoundError, package: str, minimum: str) -> ImportError:
    """The error to raise from a failed import of a framework.

    Args:
        error: The import's exception.
        package: The framework's name, to import and to install it.
        minimum: The oldest supported version.

    Returns:
        An error with the command to install; `error` itself if another module than the framework is missing.
    """
    if (error.name or "").split(".")[0] != package:
        return error
    return ImportError(f"this integration needs {package}, which is not installed: pip install '{package}>={minimum}'")
