"""Run test methods of one file and write the outcome of each, line by line.

    python -m tests.triton_qa.methods FILE OUTCOMES [METHOD ...]

Each line of OUTCOMES is a JSON object. The first lists all methods, and without a METHOD it is the only one. Each method
has a line when it starts, and one with its `outcome` when it ends.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import linecache
import re
import sys
import time
import traceback
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TextIO

import numpy as np

ErrorInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
ERROR_CHARACTERS = 2000  # limit on an error's text; a page of metrics has more
# Parts of a line of a test that compares an error's text by hand.
TEXT_PARTS = re.compile(
    r"""\.startswith\(|message\(\)|\bstr\(e(x|rr|rror|xception)?\b| in str\(|\.text|\[.error.\]|err(or)?_msg"""
)


class Outcomes(unittest.TestResult):
    """Writes each outcome at once, as the process may be killed while a method hangs."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file

    def write(self, **values: object) -> None:
        """Write one line."""
        self._file.write(json.dumps({**values, "at": time.monotonic()}) + "\n")
        self._file.flush()

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802  (unittest's name)
        super().startTest(test)
        self.write(name=_name(test))

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802  (unittest's name)
        super().addSuccess(test)
        self.write(name=_name(test), outcome="passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802  (unittest's name)
        super().addSkip(test, reason)
        self.write(name=_name(test), outcome="skipped", error=reason)

    def addFailure(self, test: unittest.TestCase, err: ErrorInfo) -> None:  # noqa: N802  (unittest's name)
        self._fail(test, err)  # first, as unittest removes its own frames from the traceback
        super().addFailure(test, err)

    def addError(self, test: unittest.TestCase, err: ErrorInfo) -> None:  # noqa: N802  (unittest's name)
        self._fail(test, err)
        super().addError(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: ErrorInfo | None) -> None:  # noqa: N802
        if err is not None:
            self._fail(test, err)
        super().addSubTest(test, subtest, err)

    def _fail(self, test: unittest.TestCase, err: ErrorInfo) -> None:
        traceback.print_exception(err[1])
        self.write(name=_name(test), outcome="failed", error=_first_line(err[1]), is_text=_is_about_text(err[1]))


# The QA has names that NumPy 2 took out.
np.NINF = -np.inf  # type: ignore[attr-defined]  # noqa: NPY201  (for the files of the QA)


def load(path: Path) -> ModuleType:
    """Load a test file as a module of its name, and do what it does as a program, up to running its tests."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'":
            body = [part for part in statement.body if "unittest.main" not in ast.unparse(part)]
            exec(compile(ast.Module(body, []), path, "exec"), vars(module))  # noqa: S102  (the file is run as a whole anyway)
    return module


def cases(module: ModuleType) -> Iterator[type[unittest.TestCase]]:
    """Yield the module's own classes of tests; classes that are written for pytest become TestCases."""
    for value in list(vars(module).values()):
        if not isinstance(value, type) or value.__module__ != module.__name__:
            continue
        if issubclass(value, unittest.TestCase):
            yield value
        elif value.__name__.startswith("Test"):
            yield type(value.__name__, (value, unittest.TestCase), {"__module__": module.__name__})


def main(path: Path, outcomes: Path, wanted: list[str]) -> None:
    """List the methods of a file, and run those that are wanted."""
    loader = unittest.TestLoader()
    tests = [test for case in cases(load(path)) for test in loader.loadTestsFromTestCase(case)]
    with outcomes.open("a") as file:
        result = Outcomes(file)
        result.write(methods=[_name(test) for test in tests])
        for case in dict.fromkeys(type(test) for test in tests):
            chosen = [test for test in tests if type(test) is case and _name(test) in wanted]
            if chosen:
                unittest.TestSuite(chosen).run(result)


def _name(test: Any) -> str:
    return ".".join(test.id().rsplit(".", 2)[-2:])


def _first_line(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0] if isinstance(error, AssertionError) else f"{type(error).__name__}: {lines[0]}"


def _is_about_text(error: BaseException | None) -> bool:
    """Return whether the assertion that failed compares the text of an error.

    What failed first counts: the QA's methods catch it, and fail once more with its text in theirs.
    """
    while isinstance(error, AssertionError) and isinstance(error.__context__, AssertionError):
        error = error.__context__
    if not isinstance(error, AssertionError):
        return False
    if ' does not match "' in str(error):
        return True
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        values = frame.f_locals
        for pair in (("first", "second"), ("member", "container"), ("text", "expected_regex")):
            if all(name in values for name in pair):
                return all(_is_short_text(values[name]) for name in pair if name != "expected_regex")
    own = [entry for entry in traceback.extract_tb(error.__traceback__) if "/unittest/" not in entry.filename]
    return bool(own) and TEXT_PARTS.search(_statement(own[-1])) is not None


def _is_short_text(value: object) -> bool:
    return isinstance(value, str) and len(value) < ERROR_CHARACTERS


def _statement(entry: traceback.FrameSummary) -> str:
    first = entry.lineno or 1
    return "".join(linecache.getline(entry.filename, line) for line in range(first, (entry.end_lineno or first) + 1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
