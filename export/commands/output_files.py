"""Files that a command writes beside its result: checked before any work is done, so that it is not done in vain."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile

from export.errors import ExportError, UsageError


def require_output(path: Path | None, what: str, *, others: Iterable[Path | None]) -> None:
    """Check that a file can be written, in a folder that exists, and is none of the files that the command reads or writes.

    Args:
        path: The file; None for none.
        what: What will be in it, such as "the certificate".
        others: The command's other files; None for absent ones.

    Raises:
        ExportError: It cannot, or it is.
    """
    if path is None:
        return
    try:
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ExportError(f"cannot write {what} {path}: expected a file in a folder that exists")
        if any(other is not None and path.resolve() == other.resolve() for other in others):
            raise ExportError(f"cannot write {what} to {path}: that is another file of this command; give it a name of its own")
        _try_out(path)
    except (OSError, RuntimeError) as error:  # a name that is too long, links in a circle
        raise ExportError(f"cannot write {what} {path}: {getattr(error, 'strerror', None) or error}") from error


def _try_out(path: Path) -> None:
    if path.exists() and not path.is_file():  # a pipe or a device, which is written to as it is
        return
    with TemporaryFile(dir=path.resolve().parent):
        pass


def page_beside(certificate: Path | None, *, html: bool) -> Path | None:
    """The file of the page beside a certificate, where one is wanted.

    Raises:
        UsageError: It is wanted, and there is no certificate for it to be beside.
    """
    if html and certificate is None:
        raise UsageError("--html writes its page beside the certificate; give --certificate PATH too")
    return certificate.with_suffix(".html") if html and certificate is not None else None
