"""Write docs/reference/licences.md: the licence of every package of hashes.txt, from the metadata that the package index has.

`make licences` calls `python -m deploy.release.licences`. No package is installed, and no wheel that has its metadata beside it
is downloaded.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PAGE = Path("docs/reference/licences.md")
HASHES = Path("hashes.txt")
PROJECT = Path("pyproject.toml")
# Extras that only developers of the project install.
DEVELOPERS = frozenset({"demo", "dev", "docs"})
# A requirement counts if it holds on one of these.
PLATFORMS = (
    {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64"},
    {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": "aarch64"},
    {"sys_platform": "darwin", "platform_system": "Darwin", "os_name": "posix", "platform_machine": "arm64"},
    {"sys_platform": "win32", "platform_system": "Windows", "os_name": "nt", "platform_machine": "AMD64"},
)
ENVIRONMENTS = [
    {**platform, "python_version": version, "python_full_version": f"{version}.0"}
    for platform in PLATFORMS
    for version in ("3.11", "3.14")
]
# How licences are written where they are no SPDX expression, in lower case.
WRITTEN = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD",
    "bsd license": "BSD",
    "gnu general public license (gpl)": "GPL",
    "gplv2": "GPL-2.0-only",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "nvidia proprietary software": "LicenseRef-NVIDIA-Proprietary",
    "other/proprietary license": "LicenseRef-Proprietary",
    "public domain": "public domain",
    "python software foundation license": "PSF-2.0",
}
UNKNOWN = "unknown"
# What a licence asks of someone who passes the package on, by a part of its name; the first that fits counts.
ATTENTION = {
    "Proprietary": "Not open source. Read its terms before you publish an image that has it.",
    "NVIDIA": "Not open source. Read its terms before you publish an image that has it.",
    "LGPL": "May be used from programs under any licence; changes of the package itself must be published.",
    "GPL": "Whoever passes it on must offer its source. halfserve starts it as a program, or its release uses it.",
    "MPL": "May be used from programs under any licence; changes of its files must be published.",
    UNKNOWN: "Its metadata names no licence: read its project's page.",
}


def hashed_versions(text: str) -> dict[str, str]:
    """Return the versions in a file of hashes, by canonical name."""
    found = re.findall(r"^([\w.-]+)(?:\[.*?\])?==([^ ;]+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def licence(metadata: Mapping[str, Any]) -> str:
    """Return the licence of a package as SPDX where its metadata says it so, or by a known name, else "unknown"."""
    if expression := metadata.get("license_expression"):
        return str(expression)
    text = str(metadata.get("license", "")).strip()
    try:
        return str(canonicalize_license_expression(text))
    except InvalidLicenseExpression:
        pass
    classified = [line.split(" :: ")[-1] for line in metadata.get("classifier", ()) if line.startswith("License")]
    if text.lower() in WRITTEN and WRITTEN[text.lower()] != "BSD":
        return WRITTEN[text.lower()]
    named = [*classified, text.rpartition(" :: ")[2]] if " :: " in text else classified
    return ", ".join(dict.fromkeys(WRITTEN.get(name.lower(), name) for name in named)) or WRITTEN.get(text.lower(), UNKNOWN)


def brought_by(requirements: Mapping[str, Iterable[str]], project: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return for each package the extras that bring it; an empty list if each installation has it.

    Args:
        requirements: by canonical name, the lines "Requires-Dist" of each package.
        project: the table "project" of pyproject.toml.
    """
    extras = project["optional-dependencies"]
    always = set(_closure(project["dependencies"], requirements, extras))
    by_package: dict[str, list[str]] = {name: [] for name in always}
    for extra in sorted(extras.keys() - DEVELOPERS):
        for name in set(_closure(extras[extra], requirements, extras)) - always:
            by_package.setdefault(name, []).append(extra)
    return by_package


def page(packages: Iterable[Mapping[str, Any]], project: Mapping[str, Any]) -> str:
    """Return the page, in Markdown, of packages' metadata as pip's installation report has it."""
    by_name = {canonicalize_name(package["name"]): package for package in packages}
    bringing = brought_by({name: package.get("requires_dist", ()) for name, package in by_name.items()}, project)
    rows, attention = [], dict[tuple[str, str], list[str]]()
    for name, package in sorted(by_name.items()):
        found = licence(package)
        extras = ", ".join(f"`{extra}`" for extra in bringing[name]) or "always" if name in bringing else "the builder"
        rows.append(f"| {_linked(name, package)} | {package['version'].partition('+')[0]} | {found} | {extras} |")
        if asked := next((said for part, said in ATTENTION.items() if part in found), None):
            attention.setdefault((found, asked), []).append(f"{name} ({extras})")
    needing = [f"| {found} | {', '.join(names)} | {asked} |" for (found, asked), names in sorted(attention.items())]
    return f"""<!-- Written by make licences. -->
# Licences of dependencies

halfserve is under Apache-2.0. These are the packages that its installation and its extras bring, on any platform, with
the licence that their own metadata names: an SPDX expression where they have one. `halfserve[EXTRA]` brings what stands
beside `EXTRA`; "the builder" builds archives and images and is in none of them. A wheel may hold libraries under
further licences: they lie in its `licenses` folder. The images also have Debian's packages (`/usr/share/doc/*/copyright`).

## Licences that need attention

| licence | packages (extra) | what it asks |
|---|---|---|
{chr(10).join(needing)}

## All packages

| package | version | licence | brought by |
|---|---|---|---|
{chr(10).join(rows)}
"""


def _closure(texts: Iterable[str], requirements: Mapping[str, Iterable[str]], own: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the canonical names of everything that these requirements bring on some platform; `own` are halfserve's extras."""
    waiting = [Requirement(text) for text in texts]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen or not _holds(requirement.marker, frozenset()):
            continue
        seen.add((name, extras))
        if name == "halfserve":
            waiting += [Requirement(text) for extra in extras for text in own[extra]]
            continue
        if name in requirements:
            yield name
        for text in requirements.get(name, ()):
            needed = Requirement(text)
            if _holds(needed.marker, extras):
                needed.marker = None
                waiting.append(needed)


def _holds(marker: Marker | None, extras: frozenset[str]) -> bool:
    return marker is None or any(
        marker.evaluate({**environment, "extra": extra}) for environment in ENVIRONMENTS for extra in (extras or {""})
    )


def _linked(name: str, metadata: Mapping[str, Any]) -> str:
    """Return the name, as a link to the project's page where the metadata has one that is not an index's."""
    labelled = [line.split(", ", 1) for line in metadata.get("project_url", ()) if ", " in line]
    best = [url for label, url in labelled if re.match("home|source|repo|github|code", label, re.IGNORECASE)]
    urls = [*best, metadata.get("home_page") or "", *(url for _, url in labelled)]
    found = next((url for url in urls if url and "://pypi" not in url), None)
    return f"[{name}]({found})" if found else name


def _metadata(versions: Mapping[str, str]) -> list[dict[str, Any]]:
    """Ask the package index for the packages' metadata; other indexes and folders of this machine are left out."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, report = Path(folder) / "wanted.txt", Path(folder) / "report.json"
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()), encoding="ascii")
        index = ["--index-url", os.environ["UV_DEFAULT_INDEX"]] if "UV_DEFAULT_INDEX" in os.environ else []
        options = ["--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:", "--report", str(report), *index]
        subprocess.run(
            [sys.executable, "-m", "pip", "--isolated", "install", "--quiet", *options, "--requirement", str(wanted)],
            check=True, env={**os.environ, "PIP_CONFIG_FILE": os.devnull},
        )  # fmt: skip
        return [installed["metadata"] for installed in json.loads(report.read_text(encoding="utf-8"))["install"]]


if __name__ == "__main__":
    packages = _metadata(hashed_versions(HASHES.read_text(encoding="utf-8")))
    PAGE.write_text(page(packages, tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]), encoding="utf-8")
