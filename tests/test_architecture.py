"""The arrows between the rooms: stages meet in files on disk and in protos/, never in each other's Python.

`halfserve/files/` is what all of them do with files; `halfserve/installation.py` names the command that adds an extra.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "halfserve"
STAGES = ("files", "protos", "amp_core", "export", "serve")
FOLDERS = (*STAGES[1:], "examples")  # at the top level of a checkout
BARE = re.compile(rf"\b(from|import) +({'|'.join(FOLDERS)})\b")
# What of our own each room may import, besides itself.
ALLOWED = {
    "files": set[str](),
    "protos": {"files"},
    "amp_core": {"files"},
    "export": {
        "files",
        "protos",
        "amp_core.policy",
        "amp_core.calling",
        "amp_core.checkpoint",
        "amp_core.recorder",
        "amp_core.weights",
    },
    "serve": {"files", "protos"},
}
# Within serve a request's way is straight: each room knows only what is below it (the engine declares what a backend is).
BELOW = {
    "serve/engine": {"serve.engine"},
    "serve/trials": {"serve.trials", "serve.engine"},
    "serve/backends": {"serve.backends", "serve.trials", "serve.engine"},
    "serve/observability": {"serve.observability", "serve.engine"},
    "serve/storage": {"serve.storage", "serve.engine"},
    "serve/protocol": {"serve.protocol", "serve.observability", "serve.engine"},
    "serve/security": {"serve.security", "serve.protocol", "serve.engine.errors"},
    "serve/transports": {
        "serve.transports",
        "serve.security",
        "serve.protocol",
        "serve.engine.errors",
        "serve.engine.queueing.client_queue",
    },
    "serve/http": {
        "serve.http",
        "serve.transports.listener",
        "serve.transports.listening",
        "serve.transports.read_scheduler",
        "serve.transports.task_turns",
        "serve.security",
        "serve.protocol",
        "serve.observability",
        "serve.engine",
    },
    "serve/fleet/member": {
        "serve.fleet.member",
        "serve.log_handler",
        "serve.transports",
        "serve.security",
        "serve.protocol",
        "serve.observability",
        "serve.engine",
    },
    "serve/fleet/agent": {
        "serve.fleet.agent",
        "serve.fleet.control",
        "serve.fleet.member",
        "serve.transports",
        "serve.protocol",
        "serve.engine.errors",
    },
    "serve/fleet/control": {
        "serve.fleet.control",
        "serve.fleet.member.fleet_commands",
        "serve.fleet.member.member_counters",
        "serve.protocol.status",
        "serve.engine.errors",
    },
    "serve/fleet/launch": {
        "serve.fleet",
        "serve.client",
        "serve.log_handler",
        "serve.storage",
        "serve.transports",
        "serve.security",
        "serve.protocol",
        "serve.engine",
    },
    "serve/client": {"serve.client", "serve.protocol.raw_tensors"},
    "serve/benchmark": {"serve.benchmark", "serve.client", "serve.protocol.raw_tensors", "serve.engine.cuda_driver"},
}
# Rooms that know nothing of the command line: their settings are plain dataclasses, which serve/options/ makes.
WITHOUT_COMMANDS = (
    *(
        "serve/engine",
        "serve/trials",
        "serve/backends",
        "serve/protocol",
        "serve/transports",
        "serve/http",
        "serve/model_control",
    ),
    *("serve/observability", "serve/storage", "serve/fleet/member", "serve/fleet/agent", "serve/fleet/control"),
)
OPENVINO_ROOM = "serve/backends/openvino"
RAY = "serve/fleet/launch/ray_"  # start of the names of its modules
# Where torch may be imported at all.
TORCH = {"amp_core", "export"}
TORCH_BACKEND = "serve/backends"  # there in files named torch_*, which nothing imports before a torch program is served


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


def under(module: str, roots: set[str]) -> bool:
    return any(module == root or module.startswith(f"{root}.") for root in roots)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_only_what_it_may(stage: str) -> None:
    for path in files(stage):
        for module in imported(path):
            if module.split(".")[0] in STAGES:
                assert under(module, ALLOWED[stage] | {stage}), f"{path.relative_to(ROOT)} imports {module}"


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


@pytest.mark.parametrize("room", BELOW)
def test_within_serve_a_room_knows_only_what_is_below(room: str) -> None:
    for path in files(room):
        for module in imported(path):
            if under(module, {"serve"}):
                assert under(module, BELOW[room]), f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("room", WITHOUT_COMMANDS)
def test_below_the_commands_a_room_knows_no_options_of_theirs(room: str) -> None:
    for path in files(room):
        assert not any(under(m, {"typer", "option_groups", "serve.options"}) for m in imported(path)), path


def test_contracts_and_files_need_protobuf_and_numpy_alone() -> None:
    paths = (ROOT / "installation.py", *files("files"), *(path for path in files("protos") if path.name != "generate.py"))
    outside = {m.split(".")[0] for path in paths for m in imported(path)}
    # ml_dtypes gives numpy its bfloat16, fsspec opens object storage, S3 by s3fs over aiobotocore, cryptography signs
    # certificates, and Pillow (PIL) decodes pictures; they are imported when such a tensor, URL, key or picture is met.
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
        "PIL",
    }
    assert {name for name in outside - ours if name not in sys.stdlib_module_names} == set()


def test_ray_is_needed_by_few_modules_only() -> None:
    for path in files("serve"):
        assert str(path).startswith(str(ROOT / RAY)) or not any(under(m, {"ray"}) for m in imported(path)), path


def test_the_supervisor_imports_the_standard_library_alone() -> None:
    """It is a process of its own, whose memory counts."""
    known, found = set[str](), {"serve.fleet.launch.supervisor"}
    while found - known:
        known |= found
        found |= {target for module in known for target in arrows()[module]}
    outside = {module.split(".")[0] for name in known for module in imported(MODULES[name])} - {"serve", "halfserve"}
    assert {name for name in outside if name not in sys.stdlib_module_names} == set()


def test_openvino_is_needed_by_one_room_only() -> None:
    """Nothing imports that room before a model needs it; crash probe and `halfserve doctor` import the package in a child."""
    children = {ROOT / "serve/backends/onnx_runtime/probe_child.py", ROOT / "serve/doctor/examination.py"}
    for path in files("serve"):
        allowed = path.is_relative_to(ROOT / OPENVINO_ROOM) or path in children
        assert allowed or not any(under(m, {"openvino"}) for m in imported(path)), path


def test_torch_stays_where_it_belongs() -> None:
    for stage in set(STAGES) - TORCH:
        for path in files(stage):
            allowed = path.parent == ROOT / TORCH_BACKEND and path.name.startswith("torch_")
            assert allowed or not any(under(m, {"torch"}) for m in imported(path)), path


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
