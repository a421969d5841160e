"""The page of licences names what users install, in the version that hashes.txt pins, and what metadata says of a licence."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.release.licences import DEVELOPERS, HASHES, PAGE, PROJECT, hashed_versions, licence, page
from tests.deploy.manifests import ROOT

ROW = re.compile(r"^\| \[?([a-z0-9-]+)(?:\]\(https?://\S+\))? \| (\S+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def test_no_dependency_of_an_extra_lacks_its_licence() -> None:
    _, _, table = (ROOT / PAGE).read_text(encoding="utf-8").partition("|---|---|---|---|\n")
    rows = {name: (version, text, by) for name, version, text, by in ROW.findall(table)}
    assert {name: version for name, (version, _, _) in rows.items()} == hashed_versions(
        (ROOT / HASHES).read_text(encoding="utf-8")
    ), "run make licences"
    project = tomllib.loads((ROOT / PROJECT).read_text(encoding="utf-8"))["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    for extra, texts in extras.items():
        for name in {canonicalize_name(Requirement(text).name) for text in texts}:
            if extra not in DEVELOPERS and name != "halfserve":
                _, _, by = rows[name]
                assert by == "always" or (extra and f"`{extra}`" in by), f"{name}, of {extra}: run make licences"


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"license_expression": "MPL-2.0 AND MIT", "license": "other"}, "MPL-2.0 AND MIT"),
        ({"license": "apache-2.0"}, "Apache-2.0"),
        ({"license": "Dual", "classifier": ["License :: OSI Approved :: BSD License", "License :: Other"]}, "BSD, Other"),
        ({"license": "MIT License\n\nCopyright (c) ...", "classifier": ["License :: OSI Approved :: MIT License"]}, "MIT"),
        ({"license": "Ask us"}, "unknown"),
    ],
)  # fmt: skip
def test_a_licence_is_an_spdx_expression_where_its_metadata_allows(metadata: dict[str, Any], said: str) -> None:
    assert licence(metadata) == said


def test_a_licence_that_needs_attention_is_named_with_the_extras_that_bring_it() -> None:
    project = {"dependencies": ["a"], "optional-dependencies": {"x": ["b[fast]", "halfserve[y]"], "y": ["a"], "dev": ["c"]}}
    packages: list[dict[str, Any]] = [
        {"name": "a", "version": "1", "license_expression": "MIT", "requires_dist": ["d; sys_platform == 'win32'"]},
        {
            "name": "b",
            "version": "1",
            "license_expression": "MIT",
            "requires_dist": ["e; extra == 'fast'", "f; extra == 'no'"],
        },
        {"name": "d", "version": "1", "license_expression": "MIT"},
        {"name": "e", "version": "1", "license_expression": "LGPL-3.0-only"},
        {"name": "f", "version": "1", "license_expression": "GPL-3.0-only"},
    ]
    text = page(packages, project)
    assert "| LGPL-3.0-only | e (`x`) | May be used" in text
    assert "| d | 1 | MIT | always |" in text
    assert "| f | 1 | GPL-3.0-only | the builder |" in text
