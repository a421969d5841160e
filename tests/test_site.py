"""The documentation site as a browser shows it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.http.chromium import Tab, chromium, find_chromium
from tests.written_blocks import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
PHONE = 390  # pixels
ARTICLE_IS_THERE = "document.readyState === 'complete' && document.querySelector('article')"
BEYOND = """[...document.querySelectorAll('article *')]
  .filter(e => !e.closest('.table-wrapper, pre, .sig') && e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.outerHTML.slice(0, 120))"""
BROKEN_WORDS = "[...document.querySelectorAll('td code .pre')].filter(e => e.offsetHeight > 30).map(e => e.textContent)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the built site."""
    built = tmp_path_factory.mktemp("site")
    options = ["--fail-on-warning", "--quiet", "--doctree-dir", str(tmp_path_factory.mktemp("doctrees"))]
    subprocess.run([sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(built)], check=True, timeout=1000)
    return built


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    program = find_chromium()
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    with chromium(program, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


def test_no_page_is_wider_than_a_phone_or_breaks_options(tab: Tab, site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    wrong: dict[str, object] = {}
    for page in pages:
        tab.open("about:blank")
        tab.open(page.as_uri(), width=PHONE)
        tab.wait_for(ARTICLE_IS_THERE)
        found = [tab.read("document.documentElement.scrollWidth"), tab.read(BEYOND), tab.read(BROKEN_WORDS)]
        if found != [PHONE, [], []]:
            wrong[page.relative_to(site).as_posix()] = found
    assert wrong == {}


@pytest.mark.parametrize("dark", [False, True])
def test_the_start_page_has_cards_and_copy_buttons(tab: Tab, site: Path, dark: bool) -> None:
    for width, most in ((1280, 1800), (PHONE, 3500)):
        tab.open("about:blank")
        tab.open((site / "index.html").as_uri(), width=width, dark=dark)
        tab.wait_for(f"{ARTICLE_IS_THERE} && document.querySelector('.highlight .copybtn')")
        assert tab.read("[...document.querySelectorAll('.cards > li strong')].map(e => e.textContent)") == [
            "Convert",
            "Serve",
            "From Triton",
            "Train",
            "Measure",
            "Operate",
        ]
        assert tab.read("document.querySelector('article').offsetHeight") < most
