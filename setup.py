"""The packages, and the compiled hot path.

In a checkout `halfserve/` links to each folder of code that lies beside it; a source archive and an installed package hold the
folders themselves. Where mypyc and a C compiler are there, the modules of halfserve/compiled_build.py are compiled; where not,
the installation is complete without.
"""

from __future__ import annotations

import ast
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import chain
from pathlib import Path
from runpy import run_path
from subprocess import CalledProcessError
from typing import ClassVar

from setuptools import Extension, find_namespace_packages, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
PACKAGE = HERE / "halfserve"
COMPILED = run_path(str(PACKAGE / "compiled_build.py"))
PLACEHOLDER = "halfserve.serve.compiled"  # an extension that stands for the modules until they are translated
SUFFIX = EXTENSION_SUFFIXES[0]
# Types are checked by `make types`; here they only tell mypyc what is what. What is not ours is not read and not even looked
# for, so that a build in isolation gives the same code, and an installed package makes no library older than its code.
MYPY_SETTINGS = """[mypy]
python_version = {version}
explicit_package_bases = true
namespace_packages = true
ignore_missing_imports = true
no_site_packages = true
follow_imports = skip
disable_error_code = var-annotated
cache_dir = {cache}
[mypy-halfserve.serve.*,halfserve.protos.*,halfserve.files.*]
follow_imports = silent
"""


class CompileLibraries(build_ext):
    """Compiles each library that is older than its code, and says how long that took, and how many are done."""

    done = 0

    def build_extension(self, ext: Extension) -> None:
        started = time.monotonic()
        super().build_extension(ext)
        folder = ext.name.rpartition(".compiled_")[2].removesuffix(COMPILED["LIBRARY"])
        seconds = time.monotonic() - started
        self.done += 1
        if folder != ext.name and seconds >= 1:
            _say(f"  {self.done} of {len(self.extensions)}: {folder.replace('_', ' ')}, {seconds:.0f} s")


class CompileHotPath(build_ext):
    """Compiles all of the modules or none: the sources do the same."""

    user_options: ClassVar[list[tuple[str, str | None, str]]] = [
        *build_ext.user_options,
        ("modules=", None, "compile these alone, separated by commas"),
    ]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.modules = ",".join(COMPILED["MODULES"])

    def run(self) -> None:
        if (switch := os.environ.get(COMPILED["SWITCH"], "1")) != "1":
            _say(f"the hot path is not compiled now, as {COMPILED['SWITCH']} is {switch}")
            return
        serve = Path(self.get_ext_fullpath(PLACEHOLDER)).parent
        stamp = serve.parent / COMPILED["STAMP"]
        modules = self.modules.split(",")
        names = [*modules, *sorted({COMPILED["library_of"](name) for name in modules})]
        libraries = {path: serve.parent / path for name in names for path in [f"serve/{name.replace('.', '/')}{SUFFIX}"]}
        if not self.force and stamp.is_file() and stamp.read_text(encoding="ascii") == _stamp(modules, libraries):
            _say("the hot path is compiled already")
            return
        stamp.unlink(missing_ok=True)  # first: an interrupted build must not look like a whole one
        started = time.monotonic()
        try:
            self._compile(modules)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a missing mypyc or compiler, or any error of theirs)
            _remove_libraries(serve, keep=set())
            _say(f"the hot path is not compiled, the sources run instead: {_reason(error)}")
            return
        _remove_libraries(serve, keep=set(libraries.values()))
        stamp.write_text(_stamp(modules, libraries), encoding="ascii")
        _say(f"the hot path is compiled ({len(modules)} modules, {time.monotonic() - started:.0f} s)")

    def _compile(self, modules: list[str]) -> None:
        _say(f"compiling the server's hot path, {len(modules)} modules, on {os.cpu_count()} processor cores")
        started = time.monotonic()
        self.distribution.ext_modules = self._translated(modules)
        libraries = len(self.distribution.ext_modules)
        _say(f"  translated to C in {time.monotonic() - started:.0f} s; compiling {libraries} libraries")
        compiler = CompileLibraries(self.distribution)  # a new command, as this one has taken note of other extensions
        for option in ("inplace", "editable_mode", "build_lib", "build_temp", "force"):
            setattr(compiler, option, getattr(self, option))
        compiler.parallel = True
        compiler.ensure_finalized()
        compiler.run()

    def _translated(self, modules: list[str]) -> list[Extension]:
        from mypyc.build import mypycify  # noqa: PLC0415  (it may be missing)

        folder = Path(self.build_temp).resolve() / "mypyc"
        folder.mkdir(parents=True, exist_ok=True)
        settings = folder / "mypy.ini"
        settings.write_text(MYPY_SETTINGS.format(version="{}.{}".format(*sys.version_info), cache=folder / "cache"))
        os.environ["MYPYPATH"] = str(HERE)
        groups: dict[str, list[str]] = {}
        for name in modules:
            group = f"halfserve.serve.{COMPILED['library_of'](name).removesuffix(COMPILED['LIBRARY'])}"
            groups.setdefault(group, []).append(str(PACKAGE / "serve" / f"{name.replace('.', '/')}.py"))
        notes = io.StringIO()
        try:
            with redirect_stdout(notes):
                extensions: list[Extension] = mypycify(
                    [f"--config-file={settings}", *chain.from_iterable(groups.values())],
                    opt_level="2",
                    debug_level="0",
                    separate=[(paths, group) for group, paths in groups.items()],
                    target_dir=str(folder / "c"),
                )
        except SystemExit as end:
            errors = [line for line in notes.getvalue().splitlines() if ": error: " in line]
            raise RuntimeError(errors[0] if errors else f"mypyc: {end}") from end
        for extension in extensions:
            # Finding warnings, in code that mypyc writes, takes gcc longer than compiling it. What is hidden outside of its
            # library is called without a detour.
            extension.extra_compile_args = [*extension.extra_compile_args, "-Wno-error", "-Wno-all", "-fvisibility=hidden"]
        # The largest first, so that all cores have work until the end.
        return sorted(extensions, key=lambda extension: -sum(Path(path).stat().st_size for path in extension.sources))


def _stamp(modules: list[str], libraries: dict[str, Path]) -> str:
    """Return the libraries and the sources that they were made of, as compiled_build.py compares them; empty where one is
    missing.
    """
    if not all(path.is_file() for path in libraries.values()):
        return ""
    sizes = {name: path.stat().st_size for name, path in libraries.items()}
    sums = {path: COMPILED["checksum"](str(PACKAGE / path)) for path in sorted(_sources(modules))}
    return json.dumps({"suffix": SUFFIX, "libraries": sizes, "sources": sums})


def _sources(modules: list[str]) -> Iterator[str]:
    """Yield the files whose change makes the compiled modules stale: their own sources, and what these import of ours.

    Constants of modules that are not compiled end up in the compiled code too.
    """
    for name in modules:
        path = f"serve/{name.replace('.', '/')}.py"
        yield path
        for node in ast.walk(ast.parse((PACKAGE / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for imported in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    file = f"{imported.removeprefix('halfserve.').replace('.', '/')}.py"
                    if imported.startswith("halfserve.") and (PACKAGE / file).is_file():
                        yield file


def _remove_libraries(serve: Path, keep: set[Path]) -> None:
    for path in serve.rglob(f"*{Path(SUFFIX).suffix}"):
        if path not in keep:
            path.unlink()


def _reason(error: BaseException | None) -> str:
    """Return one short line; a compiler's own lines stand above it."""
    cause = error
    while cause is not None:
        if isinstance(cause, CalledProcessError):
            return f"{cause.cmd[0]} failed with exit code {cause.returncode}"
        cause = cause.__cause__ or cause.__context__
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _say(text: str) -> None:
    sys.stderr.write(f"halfserve: {text}\n")


setup(
    packages=find_namespace_packages(include=["halfserve", "halfserve.*"], exclude=["*.static", "*.__pycache__"]),
    # Without them a wheel is for any platform.
    ext_modules=[Extension(PLACEHOLDER, [])] if os.environ.get(COMPILED["SWITCH"], "1") == "1" else [],
    cmdclass={"build_ext": CompileHotPath},
)
