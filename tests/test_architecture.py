"""The arrows between the rooms: stages meet in files on disk and in protos/, never in each other's Python.

`halfserve/files/` is what all of them do with files, `halfserve/reports/` the pages that they write, and
`halfserve/installation.py` names the command that adds an extra.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "halfserve"
STAGES = ("files", "reports", "protos", "amp_core", "export", "serve")
FOLDERS = (*STAGES[2:], "examples")  # at the top level of a checkout
BARE = re.compile(rf"\b(from|import) +({'|'.join(FOLDERS)})\b")
CODE_MAP = ROOT.parent / "docs" / "explanation" / "design.md"


@dataclass(frozen=True, kw_only=True)
class MappedFolder:
    """One row of the code map.

    Attributes:
        knows: modules of ours that it may import besides itself, with all below them.
        own: packages that no folder imports whose row does not name them so.
        absent: modules and packages that it does not import at all.
    """

    knows: frozenset[str]
    own: frozenset[str]
    absent: frozenset[str]


def read_map() -> dict[str, MappedFolder]:
    """Return the rows of the code map in the design page by their folder."""
    found = {}
    text = CODE_MAP.read_text(encoding="utf-8").partition("## Code map")[2].partition("\n## ")[0]
    for line in text.splitlines():
        cells = [frozenset(re.findall(r"`([^`]+)`", cell)) for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            (folder,), _, knows, own, absent = cells
            found[folder] = MappedFolder(knows=knows, own=own, absent=absent)
    return found


MAP = read_map()
# Starts of the names of the only modules of serve that import a package; none is imported before a model or a cluster needs it.
HOMES = {"ray": "serve/fleet/launch/ray_", "openvino": "serve/backends/openvino", "torch": "serve/backends/torch_"}
# They import packages of the backends in a child process.
CHILDREN = {ROOT / "serve/backends/onnx_runtime/probe_child.py", ROOT / "serve/doctor/examination.py"}


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file; names that it takes from them look like modules.

    Ours are named by their place in the checkout: `halfserve.serve.server` is `serve.server`.
    """
    yield from (module.removeprefix("halfserve.") for module in written(path))


@cache
def written(path: Path) -> tuple[str, ...]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the arrows"
            assert node.module is not None
            found.append(node.module)
            found += (f"{node.module}.{alias.name}" for alias in node.names)  # which may be modules as well
    return tuple(found)


def files(room: str) -> list[Path]:
    found = sorted((ROOT / room).rglob("*.py"))
    assert found, f"{room} is empty"
    return found


# By their names; a package stands for its `__init__`.
MODULES = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for stage in STAGES for p in files(stage)}


@cache
def arrows() -> dict[str, set[str]]:
    """Return what each module imports of our modules."""
    return {name: {m for m in imported(path) if m in MODULES and m != name} for name, path in MODULES.items()}


def under(module: str, roots: AbstractSet[str]) -> bool:
    return any(module == root or module.startswith(f"{root}.") for root in roots)


@pytest.mark.parametrize("folder", MAP)
def test_a_folder_knows_only_what_the_map_says(folder: str) -> None:
    row, own = MAP[folder], folder.replace("/", ".")
    for path in files(folder):
        for module in imported(path):
            if module.split(".")[0] in STAGES:
                assert under(module, row.knows | {own}), f"{path.relative_to(ROOT)} imports {module}"
            assert not under(module, row.absent), f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("package", sorted({package for row in MAP.values() for package in row.own}))
def test_a_package_is_imported_only_where_the_map_says(package: str) -> None:
    homes = [ROOT / folder for folder, row in MAP.items() if package in row.own]
    for path in (path for stage in STAGES for path in files(stage)):
        at_home = any(path.is_relative_to(home) for home in homes) or path in CHILDREN
        assert at_home or not any(under(m, {package}) for m in imported(path)), path


def test_the_map_shows_each_folder() -> None:
    mapped = {ROOT / folder for folder in MAP if folder != "serve"}
    shown = {path for folder in mapped for path in (folder, *folder.parents)}
    folders = {path.parent for path in files("serve")} | {ROOT / stage for stage in STAGES}
    above = {ROOT / "serve", *(ROOT / "serve" / name for name in ("doctor", "options"))}  # which know all other rooms
    assert {f for f in folders if f not in shown | above and not any(f.is_relative_to(m) for m in mapped)} == set()


@pytest.mark.parametrize("folder", [*FOLDERS, ".", "../benchmarks", "../tests"])
def test_a_module_has_one_name(folder: str) -> None:
    bare = [
        f"{path}: {module}"
        for path in files(folder)
        if BARE.search(path.read_text(encoding="utf-8"))  # few files are to be parsed
        for module in written(path)
        if module.split(".")[0] in FOLDERS
    ]
    assert not bare, "write halfserve. in front"


def test_contracts_and_files_need_protobuf_and_numpy_alone() -> None:
    paths = (ROOT / "installation.py", *files("files"), *(path for path in files("protos") if path.name != "generate.py"))
    outside = {m.split(".")[0] for path in paths for m in imported(path)}
    # ml_dtypes gives numpy its bfloat16, fsspec opens object storage, S3 by s3fs over aiobotocore, huggingface_hub reads models
    # of a hub, cryptography signs certificates, and Pillow (PIL) decodes pictures; they are imported when such a tensor,
    # URL, name, key or picture is met.
    ours = {
        "files",
        "installation",
        "protos",
        "google",
        "numpy",
        "ml_dtypes",
        "fsspec",
        "s3fs",
        "aiobotocore",
        "cryptography",
        "huggingface_hub",
        "PIL",
    }
    assert {name for name in outside - ours if name not in sys.stdlib_module_names} == set()


@pytest.mark.parametrize(("package", "homes"), HOMES.items())
def test_a_package_is_needed_by_few_modules_only(package: str, homes: str) -> None:
    for path in files("serve"):
        at_home = str(path).startswith(str(ROOT / homes)) or path in CHILDREN
        assert at_home or not any(under(m, {package}) for m in imported(path)), path


def test_the_supervisor_imports_the_standard_library_alone() -> None:
    """It is a process of its own, whose memory counts."""
    known, found = set[str](), {"serve.fleet.launch.supervisor"}
    while found - known:
        known |= found
        found |= {target for module in known for target in arrows()[module]}
    outside = {module.split(".")[0] for name in known for module in imported(MODULES[name])} - {"serve", "halfserve", "protos"}
    assert {name for name in outside if name not in sys.stdlib_module_names} == set()


def first_cycle(leads: dict[str, set[str]]) -> str:
    """One of the ways that lead back to where they began, or nothing."""
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> str:
        if name in trail:
            return " -> ".join((*trail[trail.index(name) :], name))
        found = "" if name in done else next(filter(None, (visit(t, (*trail, name)) for t in sorted(leads.get(name, ())))), "")
        done.add(name)
        return found

    return next(filter(None, (visit(name, ()) for name in sorted(leads))), "")


def test_there_are_no_import_cycles_between_modules() -> None:
    assert first_cycle(arrows()) == ""


@pytest.mark.parametrize("folder", sorted({name.rpartition(".")[0] for name in MODULES} - {""}))
def test_there_are_no_import_cycles_between_the_rooms_of_a_folder(folder: str) -> None:
    """A file or a folder in it is a room; what a package's `__init__` shows to the outside is the house's front."""

    def room(module: str) -> str:
        return module.removeprefix(f"{folder}.").split(".")[0] if module.startswith(f"{folder}.") else ""

    rooms: dict[str, set[str]] = {}
    for module, targets in arrows().items():
        rooms.setdefault(room(module), set()).update({room(target) for target in targets} - {room(module), ""})
    rooms.pop("", None)
    assert first_cycle(rooms) == ""
