"""The project's own files install and pin everything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from halfserve.compiled_build import SWITCH
from halfserve.nvidia_libraries import nvidia_libraries

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def package_files() -> Iterator[Path]:
    """All files of the package: in a checkout `halfserve/` holds links to the folders of code, which rglob does not follow."""
    for path in (ROOT / "halfserve").iterdir():
        yield from filter(Path.is_file, path.rglob("*") if path.is_dir() else [path])


def read_by_users() -> Iterator[Path]:
    """The documents, and the sources with their messages."""
    yield from [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(path for path in package_files() if path.suffix == ".py")]


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def needed(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> None:
    """Add everything that a distribution with these extras needs on this machine to `seen`."""
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    for text in distribution(name).requires or []:
        requirement = Requirement(text)
        chosen = [requirement.marker.evaluate({"extra": extra}) for extra in extras or {""}] if requirement.marker else [True]
        if any(chosen):
            needed(canonicalize_name(requirement.name), frozenset(requirement.extras), seen)


def test_every_package_that_make_installs_is_pinned_to_what_is_installed() -> None:
    seen: set[tuple[str, frozenset[str]]] = set()
    needed("halfserve", frozenset({"dev"}), seen)
    names = {name for name, _ in seen} - {"halfserve"}
    pins = pinned()
    assert names - pins.keys() == set(), "needed, and not in constraints.txt"
    for name in names:
        assert distribution(name).version.split("+")[0] == pins[name], f"{name}: run make in a clean clone"


def test_all_that_users_and_releases_install_has_hashes_of_the_pinned_versions() -> None:
    text = (ROOT / "hashes.txt").read_text(encoding="utf-8")
    assert not re.search(r"https?:|file:|@|--(?!hash=sha256:)", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    blocks = re.findall(
        r"^([\w.-]+)(?:\[.*?\])?==([^ ;]+)[^\n]*\\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE
    )
    hashed = {canonicalize_name(name): version for name, version, _ in blocks}
    assert len(blocks) == len(re.findall(r"^\w", text, re.MULTILINE)), "a package without a hash"
    assert hashed.items() <= pinned().items(), "run make locks"
    extras = PROJECT["project"]["optional-dependencies"]
    texts = chain(PROJECT["project"]["dependencies"], *(extras[name] for name in extras.keys() - {"demo", "dev", "docs"}))
    wanted = {canonicalize_name(Requirement(text).name) for text in texts} - {"halfserve"}
    assert wanted - hashed.keys() == set(), "run make locks; a new extra belongs into LOCKED of the Makefile"


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("numpy", "1.26.4"),  # assigns 300 to an int8 as 44
        ("typer", "0.25.1"),  # with click 8.5 prints no help of arguments
        ("onnxscript", "0.7.1"),  # lacks a rule that export names
    ],
)
def test_a_version_that_is_known_to_do_wrong_is_not_allowed(name: str, version: str) -> None:
    extras = PROJECT["project"]["optional-dependencies"].values()
    requirements = [Requirement(text) for texts in (PROJECT["project"]["dependencies"], *extras) for text in texts]
    allowing = [requirement.specifier for requirement in requirements if requirement.name == name]
    assert allowing
    assert not any(specifier.contains(version) for specifier in allowing)


def test_each_library_of_cuda_has_an_upper_bound_that_allows_what_is_pinned() -> None:
    pins = pinned()
    requirements = [Requirement(text) for text in PROJECT["project"]["optional-dependencies"]["cuda"]]
    bounded = {requirement.name: requirement.specifier for requirement in requirements if requirement.name != "nvidia-ml-py"}
    assert bounded.keys() == {library.package for library in nvidia_libraries(13)} | {"onnxruntime-gpu"}
    for name, allowed in bounded.items():
        assert allowed.contains(pins[name]), name
        assert not allowed.contains("99"), f"{name}: a version that was not tested is allowed"


def test_an_installation_holds_every_module_under_one_name(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "setup.py",
        "--quiet",
        "build",
        "--build-base",
        str(tmp_path),
        "egg_info",
        "--egg-base",
        str(tmp_path),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=os.environ | {SWITCH: "0"})
    (lib,) = tmp_path.glob("lib*")
    built = {str(path.relative_to(lib)) for path in lib.rglob("*.py")}
    assert built == {str(path.relative_to(ROOT)) for path in package_files() if path.suffix == ".py"}
    assert (lib / "halfserve" / "serve" / "http" / "page" / "static" / "index.html").exists()
    program = "from halfserve.installation import code_in_use; print(code_in_use())"
    said = subprocess.run([sys.executable, "-c", program], cwd=lib, check=True, capture_output=True, text=True).stdout
    assert said == f"from an installed copy, {lib / 'halfserve'}\n"


def test_a_source_archive_holds_what_its_readme_needs(tmp_path: Path) -> None:
    """`make test` runs from an unpacked one: setuptools takes six of the tests by itself, without what they import."""
    command = [
        sys.executable,
        "setup.py",
        "--quiet",
        "egg_info",
        "--egg-base",
        str(tmp_path),
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    (listed,) = tmp_path.glob("*/SOURCES.txt")
    packed = set(listed.read_text(encoding="utf-8").splitlines())
    beside = (path for folder in ("benchmarks", "deploy", "docs", "tests") for path in (ROOT / folder).rglob("*"))
    wanted = {
        str(path.relative_to(ROOT))
        for path in chain(filter(Path.is_file, beside), package_files())
        if "__pycache__" not in path.parts and path.suffix not in {".so", ".stamp"}
    }
    wanted |= {".ci/run", ".dockerignore", "CHANGELOG.md", "Dockerfile", "LICENSE", "Makefile", "setup.py"}
    wanted |= {"constraints.txt", "hashes.txt"}
    assert wanted - packed == set()
    assert not {name for name in packed if name.endswith((".so", ".stamp"))}


def test_install_hints_take_the_checkout_as_no_index_has_the_project() -> None:
    hint = re.compile(r"(install|-U) +'?halfserve(\[|'|`)")
    assert [str(path) for path in read_by_users() if hint.search(path.read_text(encoding="utf-8"))] == []


def test_install_hints_keep_a_checkout_editable() -> None:
    """`pip install '.[hf]'` would put a copy of halfserve in place of the checkout, which is what a deployment wants alone."""
    hint = re.compile(r"pip install +(--\S+ +)*['`\"]?\.(\[|\s|`)")
    copies = [path for path in read_by_users() if hint.search(path.read_text(encoding="utf-8"))]
    assert copies == [ROOT / "docs" / "guides" / "deploying.md"]


def test_make_adds_extras_to_the_environment() -> None:
    planned = subprocess.run(
        ["make", "--dry-run", "install", "EXTRAS=hf,text"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert " --requirement pyproject.toml --extra hf --extra text" in planned.stdout
    assert {"hf", "text"} <= PROJECT["project"]["optional-dependencies"].keys()


def test_the_mypyc_that_installations_compile_with_is_the_one_that_is_tested() -> None:
    (requirement,) = (r for r in map(Requirement, PROJECT["build-system"]["requires"]) if r.name == "mypy")
    assert str(requirement.specifier) == f"=={pinned()['mypy']}"


def test_every_exception_to_a_tool_has_its_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ignored = re.findall(r'^  "[A-Z]+\d*",.*$', text, re.MULTILINE)
    assert ignored
    assert all(re.search(r"#\s+\S", line) for line in ignored)
    for path in [ROOT / "setup.py", *(path for path in package_files() if path.suffix == ".py")]:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not re.search(r"noqa(?!: [A-Z0-9, ]+  \()|pyright: ignore(?!\[\w+\]  \()", line), f"{path}: {line.strip()}"
