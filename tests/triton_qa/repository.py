"""Model repositories of the suites: models of the QA as they are, and stand-ins for its C++ backends."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.triton_qa.suite import Builder

STAND_INS = Path(__file__).parent / "stand_ins"
BACKEND = re.compile(r'^\s*backend\s*:\s*"(\w+)"', re.MULTILINE)
LIBRARY = re.compile(r'^\s*default_model_filename\s*:\s*".*\.so"', re.MULTILINE)
CONFIG = "config.pbtxt"


def copied(
    source: str,
    name: str = "",
    *,
    file: str = "",
    saved_as: str = "model.py",
    with_files: tuple[str, ...] = (),
    replacing: tuple[tuple[str, str], ...] = (),
    adding: str = "",
    versions: tuple[int, ...] = (1,),
    code: str = "",
) -> Builder:
    """Builder of a model that the QA has.

    Args:
        source: the model's folder, relative to the QA's folder.
        name: the model's name; the folder's, where there is none.
        file: the one file of code to take; all where it is empty.
        saved_as: the file's name in the repository, where `file` is given.
        with_files: further files of code, where `file` is given.
        replacing: pairs of a regular expression and what replaces it in the configuration.
        adding: text at the configuration's end.
        versions: versions that have the model's files.
        code: a file that takes the place of the model's code, relative to the QA's folder.
    """

    def build(qa: Path, repository: Path) -> None:
        made = repository / (name or Path(source).name)
        _copy_folder(qa / source, made, {file: saved_as, **{other: other for other in with_files}} if file else {}, versions)
        for version in versions if code else ():
            shutil.copy(qa / code, made / str(version) / saved_as)
        config = made / CONFIG
        text = config.read_text() if config.exists() else ""
        text = re.sub(r"^name\s*:.*$", f'name: "{made.name}"', text, count=1, flags=re.MULTILINE)
        for pattern, new in replacing:
            text = re.sub(pattern, new, text, flags=re.MULTILINE)
        if text or adding:
            config.write_text(f"{text}\n{adding}\n")
        _stand_in(made)

    return build


def folder(source: str, *names: str) -> Builder:
    """Builder of all models of one folder of the QA, or of those that are named."""

    def build(qa: Path, repository: Path) -> None:
        for model in sorted((qa / source).iterdir()):
            if model.is_dir() and (not names or model.name in names):
                copied(f"{source}/{model.name}")(qa, repository)

    return build


def stand_in(backend: str, name: str, config: str) -> Builder:
    """Builder of a model of a C++ backend, for which another stands in, with its own configuration; or of an ensemble."""

    def build(_qa: Path, repository: Path) -> None:
        made = repository / name
        (made / "1").mkdir(parents=True)
        (made / CONFIG).write_text(f'name: "{name}"\n' + (f'backend: "{backend}"\n' if backend else "") + config)
        _stand_in(made)

    return build


def placed(place: str, *builders: Builder) -> Builder:
    """Builder of models that lie in another folder, relative to the test file's."""

    def build(qa: Path, repository: Path) -> None:
        (repository.parent / place).mkdir(exist_ok=True)
        for builder in builders:
            builder(qa, repository.parent / place)

    return build


def edited(file: str, *, into: str = "", replacing: tuple[tuple[str, str], ...] = (), adding: str = "") -> Builder:
    """Builder that edits a file, or writes the edited text into another; both are relative to the test file's folder.

    Args:
        file: the file to read.
        into: the file to write; `file` itself without one.
        replacing: pairs of a regular expression, line by line, and what replaces it.
        adding: text at the file's end.
    """

    def build(_qa: Path, repository: Path) -> None:
        text = (repository.parent / file).read_text()
        for pattern, new in replacing:
            text = re.sub(pattern, new, text, flags=re.MULTILINE)
        made = repository.parent / (into or file)
        made.parent.mkdir(exist_ok=True)
        made.write_text(text + adding)

    return build


def without(*patterns: str) -> Builder:
    """Builder that removes files and folders; the patterns are relative to the test file's folder."""

    def build(_qa: Path, repository: Path) -> None:
        for pattern in patterns:
            for entry in sorted(repository.parent.glob(pattern)):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    return build


def renamed(old: str, new: str) -> Builder:
    """Builder that renames a file or folder; both names are relative to the test file's folder."""

    def build(_qa: Path, repository: Path) -> None:
        (repository.parent / old).rename(repository.parent / new)

    return build


def _copy_folder(source: Path, made: Path, files: dict[str, str], versions: tuple[int, ...]) -> None:
    """Copy a model's folder; code that lies beside the configuration goes into the versions."""
    made.mkdir(parents=True, exist_ok=True)
    for entry in sorted(source.iterdir()):
        if entry.is_dir():
            shutil.copytree(entry, made / entry.name, dirs_exist_ok=True)
        elif entry.suffix != ".py":
            shutil.copy(entry, made / entry.name)
    for version in versions:
        into = made / str(version)
        into.mkdir(exist_ok=True)
        for code in sorted(source.glob("*.py")):
            if not files or code.name in files:
                shutil.copy(code, into / files.get(code.name, code.name))


def _stand_in(model: Path) -> None:
    """Let a Python model take the place of a C++ backend."""
    config = model / CONFIG
    if not config.exists():
        return
    text = config.read_text()
    found = BACKEND.search(text)
    code = STAND_INS / f"{found[1]}.py" if found else None
    if code is None or not code.exists():
        return
    config.write_text(LIBRARY.sub("", BACKEND.sub('backend: "python"', text, count=1)))
    versions = [entry for entry in model.iterdir() if entry.is_dir() and entry.name.isdecimal()]
    for version in versions or [model / "1"]:
        version.mkdir(exist_ok=True)
        shutil.copy(code, version / "model.py")


DECOUPLED = "model_transaction_policy { decoupled: True }"
SQUARE = stand_in(
    "square",
    "square_int32",
    f"""max_batch_size: 0
input [ {{ name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }} ]
{DECOUPLED}""",
)


def repeat(name: str, policy: str = "") -> Builder:
    """Builder of a model that answers with each element of IN."""
    return stand_in(
        "repeat",
        name,
        f"""max_batch_size: 0
input [
  {{ name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }},
  {{ name: "DELAY" data_type: TYPE_UINT32 dims: [ -1 ] }},
  {{ name: "WAIT" data_type: TYPE_UINT32 dims: [ 1 ] }}
]
output [ {{ name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }}, {{ name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU }} ]
{policy}""",
    )


REPEAT, NOT_DECOUPLED_REPEAT = repeat("repeat_int32", DECOUPLED), repeat("repeat_int32")
