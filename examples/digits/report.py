"""The demo's result: read from the files that the stages wrote, shown as a table and as one HTML page."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich import box
from rich.console import Group
from rich.table import Table

from halfserve.files.atomic_files import atomic_file

# From Okabe and Ito's palette, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
DOTS_PER_INCH = 150


def training_plot(steps: Sequence[dict[str, Any]], epochs: Sequence[dict[str, Any]]) -> bytes:
    """Return a PNG with three panels over the optimizer steps, from train.jsonl's lines of steps and epochs."""
    figure = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure)
    loss, accuracy, scale = figure.subplots(3, 1, sharex=True)
    numbers = [step["step"] for step in steps]
    ends = [round((i + 1) * len(steps) / max(1, len(epochs))) for i in range(len(epochs))]

    finite = [math.nan if step["loss"] is None else step["loss"] for step in steps]  # null where it overflowed: a gap
    loss.plot(numbers, finite, color=BLUE, alpha=0.55, linewidth=1, label="training")
    loss.plot(ends, [epoch["evaluation_loss"] for epoch in epochs], "o-", color=ORANGE, linewidth=2, label="held out")
    loss.set_yscale("log")
    loss.set_ylabel("loss")
    loss.legend(frameon=False)

    accuracy.plot(ends, [epoch["accuracy"] for epoch in epochs], "o-", color=GREEN, linewidth=2)
    accuracy.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    accuracy.set_ylabel("held-out accuracy")

    scale.step(numbers, [step["scale"] for step in steps], where="post", color=BLUE, linewidth=2, label="loss scale")
    skipped = [step for step in steps if step["skipped"]]
    scale.plot(
        [s["step"] for s in skipped], [s["scale"] for s in skipped], "x", color=ORANGE, markersize=9, label="skipped step"
    )
    scale.set_yscale("log", base=2)
    scale.set_ylabel("loss scale")
    scale.set_xlabel("optimizer step")
    scale.legend(frameon=False)

    for axes in (loss, accuracy, scale):
        axes.grid(visible=True, axis="y", color="#dddddd", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=DOTS_PER_INCH)
    return picture.getvalue()


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The figures of the report."""

    steps: list[dict[str, Any]]  # lines of train.jsonl, one per optimizer step
    epochs: list[dict[str, Any]]  # lines of train.jsonl, one per epoch
    certificate: dict[str, Any]  # certificate.json
    bench: dict[str, Any]  # bench.json
    bench_plot: bytes  # the load test's picture, PNG
    served_accuracy: float  # of the answers over gRPC, a fraction
    processor: str  # its name
    precisions: list[dict[str, Any]]  # of each that was served: file, computed_in, accuracy, and the figures under load

    @classmethod
    def read(cls, *, training: Path, certificate: Path, bench: Path, bench_plot: Path, **figures: Any) -> DemoResult:
        """Read the files of the stages; `figures` are the other attributes."""
        lines = [json.loads(line) for line in (training / "train.jsonl").read_text().splitlines()]
        return cls(
            steps=[line for line in lines if "step" in line],
            epochs=[line for line in lines if "accuracy" in line],
            certificate=json.loads(certificate.read_text()),
            bench=json.loads(bench.read_text()),
            bench_plot=bench_plot.read_bytes(),
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
    for table, rows in ((load, level_rows(result)), (served, served_rows(result))):
        for cells in rows:
            table.add_row(*cells)
    return Group(precision, load, served)


def write_report(path: Path, result: DemoResult) -> None:
    """Write the page: one HTML file that contains its pictures.

    Raises:
        OSError: If the file cannot be written; an existing file stays.
    """
    templates = Environment(
        loader=PackageLoader("halfserve.examples.digits", "."), autoescape=select_autoescape(["html", "j2"])
    )
    page = templates.get_template("report.html.j2").render(
        result=result,
        precision_rows=precision_rows(result),
        level_headings=LEVEL_HEADINGS,
        level_rows=level_rows(result),
        precision_headings=PRECISION_HEADINGS,
        served_rows=served_rows(result),
        training_plot=_data_url(training_plot(result.steps, result.epochs)),
        bench_plot=_data_url(result.bench_plot),
    )
    with atomic_file(path) as file:
        file.write(page.encode())


def _data_url(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
