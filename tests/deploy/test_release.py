"""What `make release` checks before it calls a release complete, and the wheel for any platform in an empty environment."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from deploy.release.__main__ import changelog_section, check_chart
from deploy.release.archives import PURE_TAG, ReleaseError, build_pure, check_contents
from deploy.release.environment import Environment
from deploy.release.smoke import smoke

CHECKOUT = Path(__file__).resolve().parents[2]
VERSION = "1.2.0"
WHEEL = f"halfserve-{VERSION}-{PURE_TAG}.whl"
METADATA = f"Metadata-Version: 2.1\nName: halfserve\nVersion: {VERSION}\n"


def wheel_of(folder: Path, files: dict[str, str], name: str = WHEEL) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as packed:
        for member, text in {f"halfserve-{VERSION}.dist-info/METADATA": METADATA, **files}.items():
            packed.writestr(member, text)
    return path


@pytest.mark.parametrize(
    ("files", "name", "said"),
    [
        ({"halfserve/a.py": "", "tests/test_a.py": ""}, WHEEL, "holds tests/test_a.py, which users do not need"),
        ({"halfserve/a.py": f"ROOT = '{CHECKOUT}'"}, WHEEL, f"halfserve/a.py names the folder {CHECKOUT} of this machine"),
        ({"halfserve/a.py": ""}, WHEEL.replace(VERSION, "1.1.0"), f"is not of version {VERSION}"),
        ({"halfserve/a.py": ""}, WHEEL.replace(PURE_TAG, "cp311-cp311-linux_x86_64"), "expected the compiled modules"),
    ],
)
def test_a_wheel_that_users_must_not_get_is_named(tmp_path: Path, files: dict[str, str], name: str, said: str) -> None:
    with pytest.raises(ReleaseError, match=r".*") as raised:
        check_contents([wheel_of(tmp_path, files, name)], VERSION, CHECKOUT)
    assert said in str(raised.value)


def test_a_release_has_the_section_of_its_version_as_its_text() -> None:
    changelog = "# Changelog\n\n## 1.2.0 (2026-01-01)\n\n### Added\n- One.\n\n## 1.1.0\n- Two.\n"
    assert changelog_section(changelog, "1.2.0") == "### Added\n- One.\n"
    assert changelog_section(changelog, "1.1.0") == "- Two.\n"
    with pytest.raises(ReleaseError, match=r"no section '## 1\.3\.0', the version in pyproject\.toml"):
        changelog_section(changelog, "1.3.0")


def test_the_chart_has_the_version_of_the_package() -> None:
    check_chart("name: halfserve\nversion: 1.2.0\nappVersion: 1.2.0\n", VERSION)
    with pytest.raises(ReleaseError, match=r"appVersion is not 1\.2\.0"):
        check_chart("name: halfserve\nversion: 1.2.0\nappVersion: 1.1.0\n", VERSION)


@pytest.mark.long
def test_the_wheel_for_any_platform_serves_without_a_compiler_and_the_checkout(tmp_path: Path) -> None:
    sources, wheel = build_pure(CHECKOUT, tmp_path)
    version = sources.name.removeprefix("halfserve-").removesuffix(".tar.gz")
    check_contents([sources, wheel], version, CHECKOUT)
    environment = Environment(tmp_path / "environment", sys.executable)
    environment.install(wheel, "convert")
    assert "answers right" in smoke(environment.installation)
