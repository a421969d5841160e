"""The demo's result: read from the files that the stages wrote, shown as a table and as one HTML page."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table

from halfserve.export.certificate.certificate import read_certificate
from halfserve.export.certificate.html import errors_part, outputs_part, verdict_part
from halfserve.files.atomic_files import atomic_file
from halfserve.installation import install_hint
from halfserve.reports.charts import Axis, Chart, charts
from halfserve.reports.page import definitions, escaped, paragraph, report_page, section, table


def training_charts(steps: Sequence[dict[str, Any]], epochs: Sequence[dict[str, Any]]) -> str:
    """Return charts over the optimizer steps, from train.jsonl's lines of steps and epochs; nothing without steps."""
    if not steps:
        return ""
    numbers = [step["step"] for step in steps]
    ends = [numbers[round((i + 1) * len(steps) / len(epochs)) - 1] for i in range(len(epochs))]
    axis = Axis.linear("optimizer step", numbers)
    training = [(step["step"], _number(step["loss"])) for step in steps]  # a gap where it overflowed
    held_out = [(end, _number(epoch["evaluation_loss"])) for end, epoch in zip(ends, epochs, strict=True)]
    loss = Chart("Loss", axis, Axis.log("loss", [value for _, value in (*training, *held_out)]))
    loss.curve("training", training, 0)
    loss.curve("held out", held_out, 1, dots=True)

    shares = [(end, 100 * epoch["accuracy"]) for end, epoch in zip(ends, epochs, strict=True)]
    accuracy = Chart("Held-out accuracy", axis, Axis.linear("%", [value for _, value in shares], from_zero=False))
    accuracy.curve("", shares, 2, dots=True)

    scales = [(step["step"], step["scale"]) for step in steps]
    scale = Chart("Loss scale", axis, Axis.log("factor", [value for _, value in scales], base=2))
    scale.steps("loss scale", scales, 0)
    skipped = [(step["step"], step["scale"]) for step in steps if step["skipped"]]
    scale.dots("skipped step: its gradients overflowed" if skipped else "", skipped, 1)
    return charts([loss.figure(), accuracy.figure(), scale.figure()])


def _number(value: Any) -> float:
    """Return a number of train.jsonl, which has null or a text for one that is not finite."""
    return math.nan if value is None else float(value)


def load_charts(levels: Sequence[dict[str, Any]]) -> str:
    """Return throughput and latency by requests in flight, from bench.json's levels."""
    amounts = [level["concurrency"] for level in levels]
    load = Axis.log("requests in flight", amounts, base=2, ticks=amounts)
    rates = [level["requests_per_second"] for level in levels]
    throughput = Chart("Throughput", load, Axis.linear("requests/s", rates))
    throughput.curve("", list(zip(amounts, rates, strict=True)), 0, dots=True)
    latency = Chart("Latency", load, Axis.linear("ms", [level["latency_ms"]["p99"] for level in levels]))
    latency.curve("p99", [(level["concurrency"], level["latency_ms"]["p99"]) for level in levels], 1, dashed=True, dots=True)
    latency.curve("p50", [(level["concurrency"], level["latency_ms"]["p50"]) for level in levels], 0, dots=True)
    return charts([throughput.figure(), latency.figure()])


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The figures of the report."""

    steps: list[dict[str, Any]]  # lines of train.jsonl, one per optimizer step
    epochs: list[dict[str, Any]]  # lines of train.jsonl, one per epoch
    certificate: dict[str, Any]  # certificate.json
    bench: dict[str, Any]  # bench.json
    served_accuracy: float  # of the answers over gRPC, a fraction
    processor: str  # its name
    precisions: list[dict[str, Any]]  # of each that was served: file, computed_in, accuracy, and the figures under load
    no_bf16: str  # why bf16 is not among them; empty where it is

    @classmethod
    def read(cls, *, training: Path, certificate: Path, bench: Path, **figures: Any) -> DemoResult:
        """Read the files of the stages; `figures` are the other attributes."""
        lines = [json.loads(line) for line in (training / "train.jsonl").read_text().splitlines()]
        return cls(
            steps=[line for line in lines if "step" in line],
            epochs=[line for line in lines if "accuracy" in line],
            certificate=json.loads(certificate.read_text()),
            bench=json.loads(bench.read_text()),
            **figures,
        )

    def summary(self) -> dict[str, Any]:
        """Return the figures of the table, for machines."""
        accuracy, figures = self.certificate["accuracy"], [output["figures"] for output in self.certificate["outputs"]]
        return {
            "accuracy": {"fp32": accuracy["reference"], "fp16": accuracy["rounded"], "served": self.served_accuracy},
            "max_abs_error": max(f["max_abs_error"] for f in figures),
            "argmax_agreement": min(f["agreement"] for f in figures),
            "non_finite": max(f["non_finite"] for f in figures),
            "samples": self.certificate["samples"],
            "model_bytes": {"fp32": self.certificate["reference_bytes"], "fp16": self.certificate["onnx_bytes"]},
            "processor": self.processor,
            "precisions": self.precisions,
            "no_bf16": self.no_bf16,
            "skipped_steps": sum(step["skipped"] for step in self.steps),
            "levels": [
                {key: level[key] for key in ("concurrency", "requests_per_second", "latency_ms", "mean_batch_size")}
                for level in self.bench["levels"]
            ],
        }


def precision_rows(result: DemoResult) -> list[tuple[str, str]]:
    """Accuracy, and the error of fp16 against fp32, a row each."""
    s = result.summary()
    accuracy, sizes = s["accuracy"], s["model_bytes"]
    return [
        ("accuracy in fp32", f"{accuracy['fp32']:.2%}"),
        ("accuracy in fp16", f"{accuracy['fp16']:.2%}"),
        ("accuracy as served over gRPC", f"{accuracy['served']:.2%}"),
        ("largest error, fp16 against fp32", f"{s['max_abs_error']:.2g}"),
        ("argmax agreement with fp32", f"{s['argmax_agreement']:.2%} of {s['samples']} images"),
        ("NaN or infinite outputs", str(s["non_finite"])),
        ("model file in fp32", f"{sizes['fp32']:,} bytes"),
        ("model file in fp16", f"{sizes['fp16']:,} bytes ({sizes['fp16'] / sizes['fp32']:.2f}x)"),
    ]


LEVEL_HEADINGS = ("in flight", "requests/s", "p50 ms", "p99 ms", "mean batch")


def level_rows(result: DemoResult) -> list[tuple[str, ...]]:
    """Return the server's figures at each concurrency, in the order of LEVEL_HEADINGS."""
    return [
        (
            str(level["concurrency"]),
            f"{level['requests_per_second']:,.0f}",
            f"{level['latency_ms']['p50']:.2f}",
            f"{level['latency_ms']['p99']:.2f}",
            "-" if level["mean_batch_size"] is None else f"{level['mean_batch_size']:.1f}",
        )
        for level in result.summary()["levels"]
    ]


PRECISION_HEADINGS = ("model file", "computed in", "accuracy", "requests/s", "ratio", "p99 ms")


def served_rows(result: DemoResult) -> list[tuple[str, ...]]:
    """Return the figures of each served precision, in the order of PRECISION_HEADINGS."""
    return [
        (
            served["file"],
            served["computed_in"],
            f"{served['accuracy']:.2%}",
            f"{served['requests_per_second']:,.0f}",
            f"{served['rate_ratio']:.2f}x",
            f"{served['p99_ms']:.2f}",
        )
        for served in result.precisions
    ]


BF16_GAIN = (
    "A network as small as this one gains little or nothing from bf16, as copies and calls take its time. On a Zen 4, MiniLM, "
    "ResNet-50 and BERT-base answer 2.1 to 2.5 times as many requests in bf16 as in fp32."
)
FP16_GAIN = (
    "On a CPU the fp16 file saves disk and download: ONNX Runtime computes it in fp32. On an NVIDIA GPU the same file is "
    "computed in fp16, with half the memory for weights; 'halfserve bench' measures there how much faster that is."
)


def why_no_bf16(processor: str, halves: Container[str], *, openvino: bool) -> str:
    """Return why the model was not served in bf16 here, and which processors do it; nothing where it was.

    Args:
        processor: The processor's name.
        halves: The types among "bf16" and "fp16" in which it has arithmetic.
        openvino: Whether OpenVINO, the runtime that computes them on CPUs, is installed.
    """
    if "bf16" not in halves:
        return (
            f"There is no row for bf16: this processor{f' ({processor})' if processor else ''} has no bf16 arithmetic that "
            "OpenVINO may use. These have: AMD from Zen 4 on, Intel's Cooper Lake and its Xeons from Sapphire Rapids on, Arm "
            "from Neoverse V1 on."
        )
    if not openvino:
        return (
            "There is no row for bf16: this processor has bf16 arithmetic, and OpenVINO, which computes in it, is not "
            f"installed; {install_hint('openvino')}"
        )
    return ""


def result_tables(result: DemoResult) -> Group:
    """Return the result for a terminal."""
    precision = Table(box=box.SIMPLE_HEAD, show_header=False, title="digits, end to end", title_justify="left")
    for row in precision_rows(result):
        precision.add_row(*row)
    load, served = Table(*LEVEL_HEADINGS, box=box.SIMPLE_HEAD), Table(*PRECISION_HEADINGS, box=box.SIMPLE_HEAD)
    served.title = f"in each precision, {result.processor}; the server takes the fastest by itself"
    served.title_justify = "left"
    for column in [*load.columns, *served.columns[2:]]:
        column.justify = "right"
    for made, rows in ((load, level_rows(result)), (served, served_rows(result))):
        for cells in rows:
            made.add_row(*cells)
    return Group(precision, load, served, *([Padding(result.no_bf16, (0, 0, 1, 2))] if result.no_bf16 else []))


def write_report(path: Path, result: DemoResult) -> None:
    """Write the page: one HTML file that contains its charts.

    Raises:
        OSError: If the file cannot be written; an existing file stays.
    """
    page = report_page("halfserve: digits, end to end", _sections(result))
    with atomic_file(path) as file:
        file.write(page.encode())


def _sections(result: DemoResult) -> Iterator[str]:
    certificate, bench = read_certificate(json.dumps(result.certificate)), result.bench
    yield "<h1>digits, end to end</h1>"
    yield paragraph(
        "Trained in fp16, converted to fp16 with a numeric verdict, served over gRPC in batches, and measured.", "quiet"
    )
    yield definitions(dict(precision_rows(result)))
    yield section("Training", training_charts(result.steps, result.epochs))
    proof = verdict_part(certificate) + outputs_part(certificate, certificate.precision) + errors_part(certificate)
    made = ", ".join(f"{name} {version}" for name, version in sorted(certificate.versions.items()))
    holds = f"It holds for the file with SHA-256 {certificate.onnx_sha256}, made {certificate.created_utc} with {made}."
    yield section("Precision certificate", proof, f"{certificate.samples} held-out images, fp16 against fp32.")
    yield paragraph(holds, "quiet")
    cores = f"{bench['machine']['cpus']} CPU cores shared with the load generator"
    measured = f"<p><code>{escaped(bench['command'])}</code></p>"
    measured += table(LEVEL_HEADINGS, level_rows(result), numbers=range(len(LEVEL_HEADINGS))) + load_charts(bench["levels"])
    yield section("Throughput and latency", measured, f"{bench['provider']}, {cores}, {bench['date']}.")
    served = table(PRECISION_HEADINGS, served_rows(result), numbers=range(2, len(PRECISION_HEADINGS)))
    about = (
        f"{result.processor}, the same requests in turns. By default the server takes the fastest precision that was proved."
    )
    yield section("Precisions", served + "".join(map(paragraph, (result.no_bf16, BF16_GAIN, FP16_GAIN))), about)
