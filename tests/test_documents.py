"""The programs of the documents run as they stand there, and every document can be found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halfserve import cli
from halfserve.serve.triton_flag_tables import FLAGS
from tests import torchvision_on_cpu
from tests.export.hugging_face_folders import sentence_folder
from tests.hub_server import hub_server
from tests.written_blocks import ROOT, blocks_of, run_in_order

REFERENCE = ROOT / "docs" / "reference"
DOCUMENTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md") if REFERENCE not in path.parents)
REFERENCE_PAGES = sorted(path.relative_to(ROOT).as_posix() for path in REFERENCE.glob("*.md"))
HUB_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
CODE_WIDTH = 88  # characters that a block shows on the site without scrolling
WITH_PROGRAMS = [document for document in DOCUMENTS if {"bash", "python"} & {block.language for block in blocks_of(document)}]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("document", WITH_PROGRAMS)
def test_the_blocks_run_in_order(document: str, tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names on a hub lead to a hub of the test's, which has a small model under the name that the tutorial uses."""
    with hub_server(monkeypatch, tmp_path / "cache") as hub:
        if HUB_MODEL in (ROOT / document).read_text(encoding="utf-8"):
            hub.push(HUB_MODEL, sentence_folder(tmp_path / "pushed", "mean_tokens"))
        assert run_in_order(blocks_of(document), tmp_path, free_port, torchvision_on_cpu.IN_PROGRAMS) >= 1


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if "/tutorials/" in document])
def test_every_tutorial_runs(document: str) -> None:
    assert document in WITH_PROGRAMS


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_readme_leads_to_every_document(document: str) -> None:
    assert f"]({document}" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", ["README.md", *DOCUMENTS, *REFERENCE_PAGES])
def test_links_lead_to_what_is_there(document: str) -> None:
    path = ROOT / document
    for target, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", path.read_text(encoding="utf-8")):
        linked = path.parent / target if target else path
        assert linked.exists(), f"{document} links to {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, heading


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_folders_and_files_that_a_newcomer_reads_of_exist(document: str) -> None:
    packages = [path.name for path in (ROOT / "halfserve").iterdir() if path.is_dir()]
    folders = "|".join([*packages, "benchmarks", "deploy", "docs", "halfserve", "tests"])
    text = (ROOT / document).read_text(encoding="utf-8")
    named = re.findall(rf"(?<![\w/.:-])(?:{folders})/(?:[\w.-]*\w/?)*", text)
    named += re.findall(r"`([\w.-]+/[\w./-]*)`", text)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_tests_that_documents_name_exist() -> None:
    named = [
        name for document in DOCUMENTS for name in re.findall(r"(tests/\S+?\.py)::(\w+)", (ROOT / document).read_text("utf-8"))
    ]
    assert len(named) > 100
    assert [
        f"{file}::{test}"
        for file, test in named
        if not re.search(rf"^ *(?:async )?def {test}\(", (ROOT / file).read_text("utf-8"), re.MULTILINE)
    ] == []


@pytest.mark.parametrize("document", ["README.md", *DOCUMENTS])
def test_code_is_no_wider_than_the_page(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert not [line for block in blocks for line in block.splitlines() if len(line) > CODE_WIDTH]


def options_of_all_commands() -> set[str]:
    found: set[str] = set()
    for _, command in cli.commands():
        for parameter in command.params:
            found |= {*parameter.opts, *parameter.secondary_opts}
    return found


# Of docker, torchrun, aws, ray and curl.
OTHERS = {"--exclude", "--target", "--build-arg", "--rm", "--read-only", "--tmpfs", "--gpus", "--nproc-per-node", "--ipc"}
OTHERS |= {
    "--cap-drop",
    "--security-opt",
    "--health-cmd",
    "--shm-size",
    "--sbom",
    "--head",
    "--port",
    "--redis-password",
    "--data-binary",
}
OTHERS |= {"--data-binary", *(f"--{name}" for name in FLAGS)}


def test_options_that_documents_name_are_there() -> None:
    known = options_of_all_commands() | OTHERS
    for document in ("README.md", *DOCUMENTS):
        if document in ("docs/explanation/benchmarks.md", "docs/explanation/reliability.md"):
            continue  # their commands are other programs'
        text = (ROOT / document).read_text(encoding="utf-8")
        # Whole commands that call other programs aside.
        own = re.sub(
            r"^.*(?:python3? -m|make|docker|helm|kubectl|perf_analyzer|aiperf|h2load|benchmarks|protoc|go_opt|openssl)"
            r"(?:.*\\\n)*.*$",
            "",
            text,
            flags=re.MULTILINE,
        )
        unknown = {option for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", own) if option not in known}
        assert not unknown, f"{document} names {sorted(unknown)}"


@pytest.mark.parametrize(
    "document",
    [
        "guides/deploying",
        "guides/kubernetes",
        "guides/serving",
        "guides/sequences",
        "guides/security",
        "explanation/reliability",
    ],
)
def test_metrics_that_documents_name_are_there(document: str) -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "halfserve" / "serve").rglob("*.py"))
    for name in re.findall(
        r"\b(?:nv|halfserve)_[a-z_]+[a-z]\b(?!/)", (ROOT / f"docs/{document}.md").read_text(encoding="utf-8")
    ):
        assert name.removesuffix("_total").removesuffix("_sum").removeprefix("halfserve_guard_") in sources, name
