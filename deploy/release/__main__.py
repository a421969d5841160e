"""Build, check and try the files of a release, and describe them: `python -m deploy.release`, which `make release` calls."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from deploy.release.archives import PURE_TAG, ReleaseError, build_compiled, build_pure, check_contents, check_description, run
from deploy.release.environment import Environment
from deploy.release.smoke import SmokeError, smoke

CHECKOUT = Path(__file__).resolve().parents[2]
OUTPUT = Path("build/release")
MB = 1e6
THIS_PYTHON = "{}.{}".format(*sys.version_info)
PYTHONS = ("3.11", "3.12", "3.13", "3.14")  # what pyproject.toml allows and is tried where it is installed


def release(
    output: Annotated[Path, typer.Option(help="Folder to write; what lies there is removed.")] = OUTPUT,
    python: Annotated[list[str] | None, typer.Option(help="Python to build for, as 3.12; without it, those at hand.")] = None,
) -> None:
    """Build the archives of a release, check them, and try each wheel in an empty environment."""
    started = time.monotonic()
    version = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    notes = changelog_section((CHECKOUT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    check_chart((CHECKOUT / "deploy/halfserve/Chart.yaml").read_text(encoding="utf-8"), version)
    output.mkdir(parents=True, exist_ok=True)
    for left in output.glob("*.*"):
        left.unlink()
    pythons = python or [found for found in PYTHONS if _is_installed(found)]
    sources, pure = build_pure(CHECKOUT, output)
    archives = [sources, pure, *(build_compiled(sources, output, found) for found in pythons)]
    check_description(archives)
    check_contents(archives, version, CHECKOUT)
    for wheel in (path for path in archives if path.suffix == ".whl"):
        is_pure = PURE_TAG in wheel.name
        tag = THIS_PYTHON if is_pure else re.sub(r".*-cp3(\d+)-.*", r"3.\1", wheel.name)
        _try(wheel, tag, output / f"halfserve-{version}.cdx.json" if is_pure else None)
    run(["helm", "package", "--destination", str(output), str(CHECKOUT / "deploy/halfserve")])
    (output / "NOTES.md").write_text(notes, encoding="utf-8")
    files = sorted(path for path in output.iterdir() if path.name not in ("SHA256SUMS", ".gitignore"))
    sums = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (output / "SHA256SUMS").write_text("".join(f"{digest}  {path.name}\n" for path, digest in sums.items()), encoding="ascii")
    for path in files:
        typer.echo(f"{path}  {path.stat().st_size / MB:.2f} MB")
    typer.echo(f"{output} is complete, after {time.monotonic() - started:.0f} s; nothing was published")


def _try(wheel: Path, python: str, bill: Path | None) -> None:
    """Try a wheel in an empty environment, and write the bill of materials of what it brings."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = Environment(Path(scratch) / "environment", python)
        installed_s = environment.install(wheel)
        if bill is not None:
            environment.write_bill(bill)
        environment.install(wheel, "convert")
        seen = smoke(environment.installation)
    typer.echo(f"{wheel.name} on Python {python}, installed in {installed_s:.1f} s: {seen}")


def changelog_section(text: str, version: str) -> str:
    """Return what the changelog says of a version, without its heading.

    Raises:
        ReleaseError: it has no section of this version.
    """
    found = re.search(rf"^## {re.escape(version)}\b[^\n]*\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ReleaseError(f"CHANGELOG.md has no section '## {version}', the version in pyproject.toml; add it")
    return found[1].strip() + "\n"


def check_chart(text: str, version: str) -> None:
    """Raise a ReleaseError if the chart names another version."""
    for field in ("version", "appVersion"):
        if f"\n{field}: {version}\n" not in f"\n{text}\n":
            raise ReleaseError(f"deploy/halfserve/Chart.yaml: {field} is not {version}, the version in pyproject.toml; set it")


def _is_installed(python: str) -> bool:
    found = subprocess.run(["uv", "python", "find", "--offline", python], capture_output=True, check=False)
    return found.returncode == 0


def main() -> None:
    """Print an error of the release as one line."""
    try:
        typer.run(release)
    except (ReleaseError, SmokeError) as error:
        typer.echo(f"release: {error}", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
