"""Options that several commands share, and how their values are read: sizes, sample files, output files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, TypeAlias

import numpy as np
import typer

from halfserve.export.certificate.budget import Budget, usual_budgets
from halfserve.export.certificate.certificate import BudgetExceeded, Certificate
from halfserve.export.export_errors import ExportError, NothingConvertedError, UsageError
from halfserve.export.file_conversion import Beside
from halfserve.export.half_types import HalfName
from halfserve.export.repository.repository_target import RepositoryTarget
from halfserve.export.tasks.task import Task

EXIT_CODES: dict[type[Exception], int] = {BudgetExceeded: 3, NothingConvertedError: 3, UsageError: 2, ExportError: 1}

budget_limit = partial(typer.Option, rich_help_panel="Budget")
report = partial(typer.Option, rich_help_panel="Report")
repository_version = partial(typer.Option, rich_help_panel="Model repository")

MAX_BATCH_SIZE = RepositoryTarget.max_batch_size

MinAgreement: TypeAlias = Annotated[float, budget_limit(help="Least share of samples with the reference's argmax.")]
HtmlPage: TypeAlias = Annotated[Path | None, report(help="Write an HTML page with tables and plots to this file.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """Limits of the errors, for models of every type."""

    max_abs_error: Annotated[
        float | None, budget_limit(help="Largest error of an output, in its unit; replaces --max-scaled-error.")
    ] = None
    max_scaled_error: Annotated[
        float | None,
        budget_limit(
            help="Largest error of an output, as a share of its largest magnitude; by default 0.01 for float16, 0.04 for "
            "bfloat16."
        ),
    ] = None
    min_agreement: MinAgreement = Budget.min_agreement

    def budgets(self) -> dict[HalfName, Budget]:
        """Return the budget of each type.

        Raises:
            UsageError: A limit is out of range.
        """
        return usual_budgets(
            max_abs_error=self.max_abs_error, max_scaled_error=self.max_scaled_error, min_agreement=self.min_agreement
        )


@dataclass(frozen=True, kw_only=True)
class VerdictFiles:
    """Files that hold the verdict, and the key that signs it."""

    certificate: Annotated[Path | None, report(help="Write the verdict to this JSON file too.")] = None
    html: HtmlPage = None
    certificate_key: Annotated[
        Path | None,
        report(
            help="Sign the certificate with the Ed25519 private key in this PEM file, for servers that hold the public key."
        ),
    ] = None

    def beside(self, *others: Path | None) -> Beside:
        """Return the files to write with a model: its certificate as JSON, and as an HTML page.

        Raises:
            ExportError: One of the two cannot be written, or is one of the `others`, which the command reads or writes besides.
        """
        require_output(self.certificate, "the certificate", others=others)
        require_output(self.html, "the page", others=(*others, self.certificate))

        def files(verdict: Certificate) -> Sequence[tuple[Path, bytes]]:
            found = [] if self.certificate is None else [(self.certificate, verdict.to_bytes())]
            if self.html is not None:
                from halfserve.export.certificate.html import certificate_page  # noqa: PLC0415  (plots are slow to import)

                found.append((self.html, certificate_page(verdict).encode()))
            return found

        return files


@dataclass(frozen=True, kw_only=True)
class VersionOptions:
    """A version in a model repository."""

    name: Annotated[str | None, repository_version(help="The model's name; by default from the source.")] = None
    version: Annotated[int | None, repository_version(help="The version; the next free one by default.")] = None
    max_batch_size: Annotated[int | None, repository_version(help="Largest batch that the server may form.")] = MAX_BATCH_SIZE
    fp32_twin: Annotated[
        bool,
        repository_version(
            "--fp32-twin", help="Add the float32 model to the version too, for a server that can fall back on it."
        ),
    ] = False

    def target(self, repository: str, *, default_name: str, task: Task | None = None) -> RepositoryTarget:
        """Return the version as a target of a conversion; `default_name` names the model where the user did not."""
        return RepositoryTarget(
            repository=repository,
            name=default_name if self.name is None else self.name,
            version=self.version,
            max_batch_size=MAX_BATCH_SIZE if self.max_batch_size is None else self.max_batch_size,
            fp32_twin=self.fp32_twin,
            default_name=self.name is None,
            task=task,
        )


Array = np.ndarray[Any, Any]

DYNAMIC = re.compile(r"(?P<input>.+)\.(?P<axis>\d+)=(?P<size>(?:[1-9]\d*\*)?(?P<name>\w+))")


def sizes_of(entries: Sequence[str]) -> dict[str, int]:
    """Parse `--dim NAME=SIZE` options into sizes by name.

    Raises:
        UsageError: An entry has another form.
    """
    sizes = {}
    for entry in entries:
        name, _, size = entry.rpartition("=")
        if not name or not (size.isascii() and size.isdigit()) or int(size) < 1:
            raise UsageError(f"--dim {entry!r} is not of the form NAME=SIZE, such as --dim sequence=128")
        sizes[name] = int(size)
    return sizes


@contextmanager
def hint_for_synthetic_inputs(*, synthetic: bool) -> Iterator[None]:
    """Add what to do to the error of a model that fails on synthetic inputs."""
    try:
        yield
    except ExportError as error:
        if synthetic and "fails on the samples" in str(error):
            hint = "the inputs were made up: give --samples, or sizes with --dim NAME=SIZE"
            raise ExportError(f"{error}; {hint}") from error
        raise


def dynamic_sizes(options: Sequence[str]) -> dict[str, dict[int, str]]:
    """Parse `--dynamic INPUT.AXIS=NAME` options into names of dimensions by input and axis.

    Raises:
        UsageError: An option has another form, is about the batch, or repeats an axis.
    """
    from halfserve.export.to_onnx.dimensions import BATCH  # noqa: PLC0415  (torch takes seconds to import)

    sizes: dict[str, dict[int, str]] = {}
    for option in options:
        found = DYNAMIC.fullmatch(option)
        if found is None or not found["name"].isidentifier():
            raise UsageError(f"--dynamic {option!r}: expected INPUT.AXIS=NAME, such as tokens.1=length")
        if found["name"] == BATCH:
            raise UsageError(f"--dynamic {option!r}: {BATCH!r} is the name of axis 0; give this size another name")
        axes, axis = sizes.setdefault(found["input"], {}), int(found["axis"])
        if axis == 0:
            raise UsageError(f"--dynamic {option!r}: axis 0 is the batch, which always varies; expected axis 1 or more")
        if axis in axes:
            raise UsageError(f"--dynamic names axis {axis} of input {found['input']!r} twice; expected each once")
        axes[axis] = found["size"]
    return sizes


def require_output(path: Path | None, what: str, *, others: Iterable[Path | None]) -> None:
    """Check before any work is done that a file, if any, can be written; `what` will be in it, such as "the certificate".

    Raises:
        ExportError: The file cannot be written, its folder does not exist, or it is one of the others that the command uses.
    """
    if path is None:
        return
    try:
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ExportError(f"cannot write {what} {path}: expected a file in a folder that exists")
        if any(other is not None and path.resolve() == other.resolve() for other in others):
            raise ExportError(f"cannot write {what} to {path}: that is another file of this command; give it a name of its own")
        if path.is_file() or not path.exists():  # pipes and devices are written to directly
            with TemporaryFile(dir=path.resolve().parent):
                pass
    except (OSError, RuntimeError) as error:  # a name that is too long, links in a circle
        raise ExportError(f"cannot write {what} {path}: {getattr(error, 'strerror', None) or error}") from error
