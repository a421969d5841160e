"""The words of a certificate's page, explained with the certificate's own figures."""

from __future__ import annotations

from collections.abc import Iterator

from halfserve.export.certificate.verdicts import PrecisionVerdict
from halfserve.export.half_types import FP16_MAX, HALF_TYPES, HalfName

ABOUT = {
    "outputs": "The answers of the converted model beside those of the float32 model, on the same samples.",
    "kinds": "Columns of one output differ in magnitude, as a box and its score do. Each kind is judged beside its own scale.",
    "errors": "For each output, how many values have an error of which size, and each value beside its float32 value: dots on "
    "the dashed line are equal.",
    "edges": "Batches made from the samples at which half precision breaks first, such as zeros, tiny and very large numbers.",
    "levels": "ONNX Runtime rewrites a model before it runs it, at the level that a server sets. The file was run at each one; "
    "its largest error is a part of the output's scale.",
    "risks": f"The results of these nodes fit float16, and a sum inside them exceeds its largest number, {FP16_MAX:,.0f}. A "
    "runtime that adds up in float32, as the usual ones do, computes them right; one that adds up in float16 gives infinity.",
    "precision": "The same file with its half-precision nodes and weights in another type, which a server may choose.",
    "kept": "Nodes that half precision would break, or make too inexact, stay as they are.",
    "repairs": "Changes of the model before its conversion, so that it computes right in half precision.",
}
LEDGER_WORDS = {
    "overflow": "numbers beyond the type's range",
    "flushed": "numbers too small for the type, which became 0",
    "subnormal": "numbers near 0 that kept fewer digits",
}
_RUNS = {
    "rounded": "simulated: the result of each operator is rounded to {half}, as hardware with {half} arithmetic does",
    "cuda": "simulated: rounded inside operators too, where ONNX Runtime's kernels for NVIDIA GPUs do that",
    "runtime": "measured: the file in ONNX Runtime on a CPU, which computes most of it in float32",
    "gpu": "measured: the file in ONNX Runtime on this machine's GPU",
}


def budget_lines(verdict: PrecisionVerdict) -> Iterator[str]:
    """Yield a sentence for each limit of the budget."""
    budget = verdict.budget
    if budget.max_abs_error is not None:
        yield f"The largest error of each output is at most {budget.max_abs_error:g}."
    else:
        yield f"The largest error of each output is at most {budget.max_scaled_error:.3g} of its scale, its largest magnitude."
    yield f"At least {100 * budget.min_agreement:.4g}% of the rows choose the same class as in float32 (agreement)."
    few = f"At most {budget.max_non_finite}" if budget.max_non_finite else "No"
    yield f"{few} values are NaN or infinite where float32's are not."
    if verdict.adversarial:
        yield f"On the samples at the edge, errors are at most {budget.adversarial_factor:g} times that."


def run_words(verdict: PrecisionVerdict, precision: HalfName) -> dict[str, str]:
    """Return what the runs mean that the verdict has."""
    runs = {output.execution for output in verdict.outputs}
    return {f"run {name}": text.format(half=precision) for name, text in _RUNS.items() if name in runs}


def figure_words(verdict: PrecisionVerdict, precision: HalfName) -> dict[str, str]:
    """Return what the columns of the outputs' table mean; the ones that the budget judges say so."""
    half, budget = HALF_TYPES[precision], verdict.budget
    judged = "max error" if budget.max_abs_error is not None else "of scale"
    words = {
        "max error": "the largest difference from float32, in the output's own unit",
        "of scale": "the largest error divided by the scale, so that outputs of any unit compare",
        "agreement": "the share of rows whose largest value, the class that the model chooses, is the same as in float32 (of "
        "integers, booleans and texts: of equal values). The budget judges it",
        "NaN/inf": "values that are NaN or infinite in one of the two models only. The budget judges it",
        "mean error": "the mean difference from float32, in the output's own unit",
        "scale": "the largest magnitude in the float32 output",
        "ulp": f"the largest distance in steps from one {half.short} number to the next. {_steps(verdict, precision)}",
        "cosine": "1 where the two answers, taken as one long vector each, have the same direction",
    }
    words[judged] += ". The budget judges it"
    return words


def _steps(verdict: PrecisionVerdict, precision: HalfName) -> str:
    """Say why a large number of steps may be within the budget, with the verdict's own largest number."""
    half = HALF_TYPES[precision]
    text = f"A step is about 1/{2 ** (half.significant_bits - 1):,} of a number, so steps beside 0 are tiny. "
    known = [output for output in verdict.outputs if output.figures.max_ulp == output.figures.max_ulp]
    if known:
        worst = max(known, key=lambda output: output.figures.max_ulp)
        f = worst.figures
        text += (
            f"Here, a value of {worst.name} ({worst.execution}) is {f.max_ulp:,.0f} steps from float32's, and no value is "
            f"more than {f.max_abs_error:.2g} from it, {f.max_scaled_error:.2g} of the scale. "
        )
    return text + "The budget does not judge steps, as a value near 0 crosses many of them with an error that does not matter"
