"""Every program in benchmarks/ can be loaded, and says what it measures and how it is called."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import benchmarks

FOLDER = Path(next(iter(benchmarks.__path__)))
ELSEWHERE = {"litserve", "triton_python_backend_utils"}  # packages of other programs' environments
PROGRAMS = {
    ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts).removesuffix(".__main__"): path
    for path in sorted(FOLDER.rglob("*.py"))
    if 'if __name__ == "__main__":' in path.read_text()
}


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_loads_and_shows_its_command(name: str) -> None:
    is_package = PROGRAMS[name].name == "__main__.py"
    try:
        program = importlib.import_module(f"{name}.__main__" if is_package else name)
    except ModuleNotFoundError as error:
        if error.name not in ELSEWHERE | {"openvino", "ray"}:
            raise
        pytest.skip(f"needs the package {error.name}")
    assert program.__doc__ is not None
    assert f"python -m {name}" in program.__doc__ or "environment" in program.__doc__, "the command, or who starts it"
