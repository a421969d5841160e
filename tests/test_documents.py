"""The programs of the documents run as they stand there, and every document can be found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.written_blocks import ROOT, blocks_of, run_in_order

DOCUMENTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("document", ["docs/training.md", "docs/converting.md", "docs/client.md"])
def test_the_blocks_run_in_order(document: str, tmp_path: Path, free_port: int) -> None:
    assert run_in_order(blocks_of(document), tmp_path, free_port) >= 1


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_readme_leads_to_every_document(document: str) -> None:
    assert f"]({document}" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", ["README.md", *DOCUMENTS])
def test_links_lead_to_what_is_there(document: str) -> None:
    path = ROOT / document
    for target, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", path.read_text(encoding="utf-8")):
        linked = path.parent / target if target else path
        assert linked.exists(), f"{document} links to {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}, heading
