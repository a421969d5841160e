"""The reports in a real browser: on a phone and on a desk, in both themes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from halfserve.examples.digits.report import DemoResult, why_no_bf16, write_report
from halfserve.export.certificate.certificate import read_certificate
from halfserve.export.certificate.html import certificate_page
from halfserve.reports.page import STYLE
from halfserve.serve.benchmark.comparison import Difference, Differences
from halfserve.serve.benchmark.page import write_page
from halfserve.serve.tuning import tuning_report
from halfserve.serve.tuning.config_edit import ConfigEdit
from halfserve.serve.tuning.search import TuningGoal, TuningOutcome, TuningPoint
from halfserve.serve.tuning.settings import TunedSettings
from halfserve.serve.tuning.tuning_report import TuningReport
from tests.serve.benchmark.levels import comparison, level, report, tally
from tests.serve.http.chromium import Tab, chromium, find_chromium
from tests.serve.http.page_audit import FAINT, beyond

LONG = "a_model_with_a_long_name_" * 6
CERTIFICATE = Path(__file__).parents[1] / "export" / "certificate" / "versions" / "7" / "certificate.json"
# A table that is wider than the screen scrolls in its box; all else has to fit.
WITHOUT_TABLES = "document.querySelectorAll('.scroll > table').forEach(table => table.remove())"
SMALLEST_TEXT = "Math.min(...[...document.querySelectorAll('svg text')].map(text => text.getBoundingClientRect().height))"


def write_certificate(path: Path) -> None:
    read = read_certificate(CERTIFICATE.read_bytes())
    outputs = [replace(output, name=LONG, violations=("max error 2 (limit 1)",)) for output in read.outputs]
    kept = {"name": LONG, "op_type": "Pow", "reason": f"its output overflows: {LONG}", "module": LONG}
    conversion = {"kept": [kept], "ledger": {"flushed": 3}, "tensors": [{"name": LONG, "elements": 8, "overflow": 123456}]}
    broken = replace(read, model=LONG, outputs=tuple(outputs), notes=(LONG,), conversion=conversion)
    path.write_text(certificate_page(broken))


def write_demo(path: Path) -> None:
    steps = [{"step": i, "loss": None if i == 2 else 1 / (i + 1), "scale": 65536.0, "skipped": i == 2} for i in range(6)]
    accuracy = {"reference": 0.99, "rounded": 0.99, "runtime": 0.99}
    served = {"file": "fp16", "computed_in": "fp32 (the fp16 model, upcast)", "accuracy": 0.98, "requests_per_second": 20238}
    result = DemoResult(
        steps=steps,
        epochs=[{"evaluation_loss": 0.3, "accuracy": 0.9}],
        certificate=json.loads(CERTIFICATE.read_text()) | {"accuracy": accuracy, "reference_bytes": 2000},
        bench=report(level(1), level(2), level(64)).to_json(),
        served_accuracy=0.99,
        processor="AMD EPYC",
        precisions=[served | {"rate_ratio": 0.79, "p99_ms": 1.05}],
        no_bf16=why_no_bf16("AMD EPYC", frozenset(), openvino=True),
    )
    write_report(path, result)


def write_bench(path: Path) -> None:
    error = Difference(output=LONG, max_abs=0.5, scaled=0.01, mismatched=123456, rows=1)
    windows = [tally([1, 2])] * 4
    levels = level(1, windows=windows, ended_early=LONG), level(8)
    between = [Differences(name=LONG, outputs=[error], not_compared=[LONG])]
    write_page(path, report(*levels, comparison=comparison("digits", LONG), differences=between))


def write_tuning(path: Path) -> None:
    points = [
        TuningPoint(choice=(TunedSettings(max_batch_size=n),), concurrency=n, requests_per_second=90.0 * n, latency_ms=0.7 * n)
        for n in range(1, 9)
    ]
    edit = ConfigEdit(path=Path("models") / LONG / "config.pbtxt", before="", after=f'name: "{LONG}"\nmax_batch_size: 8\n')
    made = TuningReport(
        model=LONG,
        models=[LONG],
        address=None,
        command=f"halfserve tune {LONG}",
        goal=TuningGoal(max_ms=5),
        outcome=TuningOutcome(points=points, start=points[0], best=points[6]),
        edits=[edit],
        notes=[LONG],
    )
    tuning_report.write_report(path, made)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    program = find_chromium()
    if program is None:
        pytest.skip("there is no Chromium on this machine")
    with chromium(program, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.mark.parametrize("write", [write_certificate, write_demo, write_bench, write_tuning])
def test_a_report_fits_every_screen_and_can_be_read_in_both_themes(
    tab: Tab, tmp_path: Path, write: Callable[[Path], None]
) -> None:
    write(tmp_path / "report.html")
    backgrounds = set()
    for width in (390, 1280):
        for dark in (False, True):
            tab.open("about:blank")
            tab.open((tmp_path / "report.html").as_uri(), width=width, dark=dark)
            tab.wait_for("document.readyState === 'complete' && document.querySelector('svg text')")
            assert tab.read("document.documentElement.scrollWidth") <= width
            assert tab.read(FAINT) == []
            assert tab.read(SMALLEST_TEXT) >= 11
            tab.read(WITHOUT_TABLES)
            assert tab.read(beyond(width)) == []
            backgrounds.add(tab.read("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2
    assert tab.complaints == []


def brightness(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_curves_stand_out_from_the_page_in_both_themes() -> None:
    """By 3 to 1, as WCAG 2.2 asks for graphics (1.4.11)."""
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6})", theme)) for theme in STYLE.split("@media")[:2])
    assert light.keys() == dark.keys()
    for theme in (light, dark):
        page = brightness(theme["page"])
        for name in ("axis", "bad", *(f"s{number}" for number in range(8))):
            low, high = sorted((page, brightness(theme[name])))
            assert (high + 0.05) / (low + 0.05) >= 3, name
