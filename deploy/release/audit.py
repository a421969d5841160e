"""Look for known vulnerabilities of the pinned packages: `python -m deploy.release.audit`, which `make audit` calls.

The exit status is 0 if a database knows none, 1 if it knows some, and 3 if no database can be reached.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PINS = Path("constraints.txt")
# Options of pip-audit; each database is asked only if those before it cannot be reached.
DATABASES = (("--vulnerability-service", "pypi"), ("--vulnerability-service", "osv"))
FOUND, NOTHING_CHECKED = 1, 3


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What the databases say of pinned packages.

    Attributes:
        status: exit status of the command.
        lines: what to print.
    """

    status: int
    lines: Sequence[str]


def audit(pins: Path, databases: Sequence[Sequence[str]] = DATABASES, options: Sequence[str] = ()) -> Audit:
    """Ask the databases in order, until one knows the packages of a file of pins.

    Args:
        pins: lines `name==version`.
        databases: pip-audit's options that choose each database.
        options: further options of pip-audit, such as --ignore-vuln ID.
    """
    unreachable = []
    for database in databases:
        command = ["-m", "pip_audit", "--requirement", str(pins), "--no-deps", "--disable-pip", "--format", "json"]
        done = subprocess.run(
            [sys.executable, *command, "--progress-spinner", "off", *database, *options],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        try:
            packages = json.loads(done.stdout)["dependencies"]
        except ValueError:
            unreachable.append(f"  {' '.join(database)}: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")
            continue
        if any("vulns" in package for package in packages):
            return _judged(packages, pins)
        unreachable.append(f"  {' '.join(database)}: it knows none of {len(packages)} packages, so it is no database")
    return Audit(
        status=NOTHING_CHECKED, lines=["audit: no vulnerability database can be reached; nothing was checked", *unreachable]
    )


def _judged(packages: list[dict[str, Any]], pins: Path) -> Audit:
    checked = [package for package in packages if "vulns" in package]
    lines = [
        f"audit: {package['name']} {package['version']} has {vulnerability['id']}: {vulnerability['description']} "
        f"(repaired in {', '.join(vulnerability['fix_versions']) or 'no release'})"
        for package in checked
        for vulnerability in package["vulns"]
    ]
    status = FOUND if lines else 0
    lines += [f"audit: not checked: {package['skip_reason']}" for package in packages if "vulns" not in package]
    lines.append(
        f"audit: {len(checked)} of {len(packages)} packages of {pins} were checked; "
        + ("update those above in it, then run make test and make locks" if status else "none has a known vulnerability")
    )
    return Audit(status=status, lines=lines)


if __name__ == "__main__":
    result = audit(PINS, options=sys.argv[1:])
    sys.stdout.write("".join(f"{line}\n" for line in result.lines))
    raise SystemExit(result.status)
