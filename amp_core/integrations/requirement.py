"""What to say when a framework that an integration needs is not installed."""

from __future__ import annotations


def not_installed(error: ModuleNotFoundError, package: str, minimum: str) -> ImportError:
    """The error to raise from a failed import.

    Args:
        error: What the import raised.
        package: The framework's name, to import and to install it.
        minimum: The oldest version that the integration works with.

    Returns:
        An error that says what to install; `error` itself if another module than the framework is missing.
    """
    if (error.name or "").split(".")[0] != package:
        return error
    return ImportError(f"this integration needs {package}, which is not installed: pip install '{package}>={minimum}'")
