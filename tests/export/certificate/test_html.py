from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import numpy as np
import onnx
import pytest

from halfserve.export.certificate.budget import Budget
from halfserve.export.certificate.certificate import Certificate
from halfserve.export.certificate.html import certificate_page
from halfserve.export.certificate.verdicts import Accuracy, AdversarialVerdict, LevelVerdict, OutputVerdict, Risk
from halfserve.export.verification.judging import plot_of
from halfserve.export.verification.metrics import compare

EVIL = "<script>alert('\"&')</script>[/b]\x00\x1b\ud800"
NAMESPACE = "{http://www.w3.org/1999/xhtml}"
SVG_PARTS = ("rect", "circle")


class TagReader(HTMLParser):
    """Counts tags, and keeps those that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen += 1
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen += 1


@pytest.fixture
def certificate(model: onnx.ModelProto, certify: Callable[[onnx.ModelProto], Certificate]) -> Certificate:
    reference = np.random.default_rng(0).standard_normal((50, 4))
    candidate = reference.astype(np.float16).astype(float)
    figures = compare(reference, candidate)
    sound = OutputVerdict(
        name=EVIL, execution="rounded", figures=figures, violations=(), plot=plot_of([(reference, candidate)], figures.scale)
    )
    kept = {"name": EVIL, "op_type": "Pow", "reason": "its output overflows: 1.3e6", "module": "net.0", "source": "a/b.py:42"}
    return replace(
        certify(model),
        model=EVIL,
        outputs=(sound, replace(sound, execution="runtime", violations=("max error 2 (limit 1)",))),
        accuracy=Accuracy(reference=0.5, rounded=0.25, runtime=0.25),
        levels=(LevelVerdict(provider="CPU", level="ORT_ENABLE_ALL", trouble="killed by SIGSEGV"),),
        adversarial=(
            AdversarialVerdict(case="zeros", execution="rounded", output="y", figures=figures),
            AdversarialVerdict(case="zeros", execution="runtime", output="y", figures=figures, violations=("1 of 2 NaN",)),
            AdversarialVerdict(case="4 times larger", execution="", output="", note="the reference fails", factor=4.0),
        ),
        headroom=16.0,
        risks=(Risk(node=EVIL, op_type="ReduceMean", what="sum of squares", reach=1e6, module="net.1"),),
        notes=("output 'z' was not compared",),
        versions={"onnx": "1.2.3"},
        conversion={
            "float_nodes": 10,
            "fp16_nodes": 9,
            "kept": [kept],
            "fp32_modules": ["net.0"],
            "ledger": {"flushed": 3},
            "repairs": [{"pass_name": "fold", "nodes": ["a"], "text": "folded"}],
            "tensors": [{"name": "w", "elements": 8, "ledger": {"overflow": 0, "flushed": 3, "subnormal": 1}}],
        },
    )


def parsed(certificate: Certificate) -> ET.Element:
    page = certificate_page(certificate)
    return ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))  # noqa: S314  (our own page)


def texts(element: ET.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def test_the_page_shows_every_part_of_a_certificate(certificate: Certificate) -> None:
    text = texts(parsed(certificate))
    for part in (
        "Over budget",
        "max error 2 (limit 1)",
        "on zeros (runtime): 1 of 2 NaN",
        "holds up to 16 times",
        "killed by SIGSEGV",
        "the reference fails",
        "its output overflows: 1.3e6",
        "a/b.py:42",
        "9 of 10 float nodes",
        "folded",
        "3 flushed",
        "25.00%, float32 50.00%",
        "1.2.3",
        "output 'z' was not compared",
        certificate.onnx_sha256,
    ):
        assert part in text


def test_every_output_has_a_histogram_and_a_scatter(certificate: Certificate) -> None:
    drawings = list(parsed(certificate).iter(f"{NAMESPACE}svg"))
    assert len(drawings) == 4
    counts = [{part: len(list(svg.iter(NAMESPACE + part))) for part in SVG_PARTS} for svg in drawings]
    titles = [texts(caption) for caption in parsed(certificate).iter(f"{NAMESPACE}figcaption")]
    assert len(set(titles)) == 4
    plot = certificate.outputs[0].plot
    assert plot is not None
    assert counts[0] == {"rect": sum(count > 0 for count in plot.counts), "circle": 0}
    assert counts[1] == {"rect": 0, "circle": len(plot.reference)}
    width, height = (float(number) for number in drawings[1].attrib["viewBox"].split()[2:])
    dots = list(drawings[1].iter(f"{NAMESPACE}circle"))
    assert all(0 < float(dot.attrib["cx"]) < width and 0 < float(dot.attrib["cy"]) < height for dot in dots)


def test_the_page_explains_the_words_that_it_uses(certificate: Certificate) -> None:
    figures = replace(certificate.outputs[0].figures, max_ulp=1034.0, max_abs_error=0.25, max_scaled_error=0.0005)
    outputs = (replace(certificate.outputs[0], name="y", figures=figures),)
    page = parsed(replace(certificate, outputs=outputs))
    words = {texts(word) for word in page.iter(f"{NAMESPACE}dt")}
    heads = {texts(head) for head in next(page.iter(f"{NAMESPACE}thead")).iter(f"{NAMESPACE}th")}
    assert heads - words == {"output", "run"}
    assert {"run rounded", "overflow", "flushed", "subnormal"} <= words
    assert "y (rounded) is 1,034 steps from float32's, and no value is more than 0.25 from it, 0.0005 of the scale" in texts(
        page
    )
    assert "at most 0.01 of its scale" in texts(page)


def test_names_from_the_model_stay_text(certificate: Certificate) -> None:
    page = certificate_page(certificate)
    assert "<script" not in page
    assert "&lt;script&gt;alert('\"&amp;')&lt;/script&gt;" in page
    page.encode()


def test_it_needs_no_other_host_and_no_script(certificate: Certificate) -> None:
    root = parsed(certificate)
    assert not {"script", "link", "img", "iframe"} & {element.tag.removeprefix(NAMESPACE) for element in root.iter()}
    assert not any(name in ("src", "href") for element in root.iter() for name in element.attrib)
    assert "url(" not in certificate_page(certificate)


def test_browsers_read_it_too(certificate: Certificate) -> None:
    reader = TagReader()
    reader.feed(certificate_page(certificate))
    assert reader.seen > 100
    assert reader.open == []


def test_a_bare_certificate_makes_a_page_without_empty_sections(
    model: onnx.ModelProto, certify: Callable[[onnx.ModelProto], Certificate]
) -> None:
    root = parsed(certify(model))
    assert "Within budget" in texts(root)
    assert [texts(heading) for heading in root.iter(f"{NAMESPACE}h2")] == ["Outputs", "Model and libraries"]


def test_a_limit_in_the_outputs_unit_is_drawn_in_units_of_its_scale(certificate: Certificate) -> None:
    def limits(budget: Budget) -> list[str]:
        lines = parsed(replace(certificate, budget=budget)).iter(f"{NAMESPACE}line")
        return [line.attrib["x1"] for line in lines if line.attrib["class"] == "limit"]

    scale = certificate.outputs[0].figures.scale
    assert limits(Budget(max_abs_error=0.02 * scale)) == limits(Budget(max_scaled_error=0.02)) != []
    assert limits(Budget(max_scaled_error=1e9)) == []
