"""Verdicts on a converter's results over cases, the share of nodes in float16, and the time of conversions."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto

from benchmarks.converters.peers import Convert, converter
from tests.export.conversions.cases import Case, cases
from tests.export.conversions.crash_pool import Crash, CrashPool
from tests.export.conversions.judge import Verdict, failed, judge, judgeable

# These change no number, or exist only because of the conversion.
UNCOUNTED = frozenset({"Cast", "CastLike", "Constant", "Identity"})
FLOATS: dict[int, str] = {TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16"}
SLOW_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class Share:
    """Nodes by the type they compute in."""

    float16: int = 0  # nodes with a float16 input or output, and no float32 output
    float32: int = 0  # other nodes with a float32 input or output
    casts: int = 0  # cast nodes

    def __add__(self, other: Share) -> Share:
        return Share(float16=self.float16 + other.float16, float32=self.float32 + other.float32, casts=self.casts + other.casts)


def share_of(model: onnx.ModelProto) -> Share:
    """Count the nodes of the graph and of its bodies; types are inferred."""
    model = onnx.shape_inference.infer_shapes(model)
    counts = {"float16": 0, "float32": 0}
    casts = 0
    for node, types in _nodes(model.graph, {}):
        casts += node.op_type == "Cast"
        if node.op_type in UNCOUNTED:
            continue
        outputs = {types[name] for name in node.output if name in types}
        inputs = {types[name] for name in node.input if name in types}
        if "float32" in outputs or (inputs == {"float32"}):
            counts["float32"] += 1
        elif "float16" in outputs | inputs:
            counts["float16"] += 1
    return Share(**counts, casts=casts)


def _nodes(graph: onnx.GraphProto, outer: dict[str, str]) -> Iterator[tuple[onnx.NodeProto, dict[str, str]]]:
    types = dict(outer)
    for value in [*graph.input, *graph.output, *graph.value_info]:
        if value.type.tensor_type.elem_type in FLOATS:
            types[value.name] = FLOATS[value.type.tensor_type.elem_type]
    for tensor in graph.initializer:
        if tensor.data_type in FLOATS:
            types[tensor.name] = FLOATS[tensor.data_type]
    for node in graph.node:
        yield node, types
        for attribute in node.attribute:
            for body in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from _nodes(body, types)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one converter for one case."""

    case: str  # the case's name
    verdict: Verdict  # the judge's verdict
    share: Share = field(default_factory=Share)  # nodes by type in the converted model; zeros if there is none


def judgeable_cases(kind: str, workers: int = 2, most: int | None = None) -> list[Case]:
    """Return the cases of a kind that ONNX Runtime's CPU runs right in float32; of about `most`, evenly chosen."""
    every = list(cases(kind))
    every = every[:: 1 if most is None else -(-len(every) // most)]
    with CrashPool(judgeable, workers=workers) as pool:
        return [case for case, counts in zip(every, pool.map((case,) for case in every), strict=True) if counts is True]


def outcomes(
    name: str, chosen: Sequence[Case], *, keep_io: bool, modelopt_python: str | None, workers: int = 2
) -> Iterator[Outcome]:
    """Convert and judge every case; a crash or a hang is a verdict."""
    with CrashPool(convert_and_judge, workers=workers, timeout_seconds=300) as pool:
        results = pool.map((name, modelopt_python, case, keep_io) for case in chosen)
        for case, result in zip(chosen, results, strict=True):
            yield Outcome(case=case.name, verdict=failed("crash", result.text)) if isinstance(result, Crash) else result


def convert_and_judge(name: str, modelopt_python: str | None, case: Case, keep_io: bool) -> Outcome:
    """Convert one case and judge the result."""
    try:
        converted = converter(name, modelopt_python)(case.model, keep_io)
    except Exception as error:  # noqa: BLE001  (converters raise anything)
        return Outcome(case=case.name, verdict=failed("convert", f"{type(error).__name__}: {error}"))
    verdict = judge(case, converted, keep_io)
    return Outcome(case=case.name, verdict=verdict, share=_share(converted))


def _share(converted: bytes) -> Share:
    try:
        return share_of(onnx.load_from_string(converted))
    except Exception:  # noqa: BLE001  (a broken model has no share)
        return Share()


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Time of a converter for a model, and size of the result."""

    seconds: float = float("nan")  # median over the rounds; NaN if it fails
    size_ratio: float = float("nan")  # size of the result divided by that of the input
    problem: str = ""  # the reason of a failure, or ""


def timings(converters: Mapping[str, Convert], model: bytes, rounds: int) -> dict[str, Timing]:
    """Run each converter `rounds` times, in a new order each round, after a first round that loads everything needed.

    A converter that takes longer than `SLOW_SECONDS` runs only once.
    """
    seconds: dict[str, list[float]] = {name: [] for name in converters}
    sizes: dict[str, int] = {}
    problems: dict[str, str] = {}
    order = list(converters)
    for number in range(rounds + 1):
        random.Random(number).shuffle(order)  # noqa: S311  (an order of turns, no secret)
        for name in [name for name in order if name not in problems and max(seconds[name], default=0) < SLOW_SECONDS]:
            start = time.monotonic()
            try:
                sizes[name] = len(converters[name](model, True))
            except Exception as error:  # noqa: BLE001  (converters raise anything)
                problems[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
                continue
            elapsed = time.monotonic() - start
            if number or elapsed >= SLOW_SECONDS:
                seconds[name].append(elapsed)
    return {
        name: Timing(problem=problems[name])
        if name in problems
        else Timing(seconds=statistics.median(seconds[name]), size_ratio=sizes[name] / len(model))
        for name in converters
    }
