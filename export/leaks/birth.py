"""Where a float32 tensor in a float16 model came from, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from export.leaks.log import Log
from export.leaks.places import Place
from export.weight_ledger import FP16_MAX

Kind = Literal["factory", "hard_coded_dtype", "integer_promotion", "numbers", "upcast", "attribute", "numpy", "outside", "kept"]

FIXES: dict[Kind, str] = {
    "factory": "dtype=x.dtype",
    "hard_coded_dtype": "dtype=x.dtype",
    "integer_promotion": ".to(x.dtype)",
    "numbers": ".to(x.dtype)",
    "upcast": ".to(x.dtype)",
    "attribute": "register_buffer",
    "numpy": "new_tensor(x, ...)",
    "outside": "register_buffer",
    "kept": "forward",
}


class Written(NamedTuple):
    """A number beyond float16's range that was written into a wide tensor: where, and in whose forward."""

    number: float
    place: Place | None
    module: str


@dataclass(eq=False, kw_only=True)
class Birth:
    """The making of a tensor that is wider than float16.

    Attributes:
        kind: How it came to be.
        what: The tensor in words: "torch.zeros makes float32[2, 8]".
        place: The user's line.
        module: Dotted name of the module that was running, or that owns the tensor.
        fix: What to write instead.
        crash: The operation that refused to mix it with float16, and torch's words.
        refused_on_cuda: The operation that mixes it with float16 on the CPU alone.
        met: The first operation in which it made a float16 tensor wide.
        rounded_into: The first in-place operation that rounded it into a float16 tensor.
        joined: The first operation where, having no dimensions, it took float16's dtype.
        outputs: Labels of the outputs that are wide because of it.
        met_before_output: Whether an operation with a float16 tensor lies between it and an output.
        beyond: What was written into it that float16 cannot hold: once the making is mended, it will not fit.
    """

    kind: Kind
    what: str
    place: Place | None
    module: str
    fix: str
    crash: str = ""
    refused_on_cuda: str = ""
    met: str = ""
    rounded_into: str = ""
    joined: str = ""
    outputs: list[str] = field(default_factory=list)
    met_before_output: bool = False
    beyond: list[Written] = field(default_factory=list)

    def tell(self, log: Log) -> None:
        """Log the worst that came of it; a tensor that did no harm is not mentioned."""
        harmless = self.kind in ("upcast", "kept")
        if not harmless and (self.crash or self.refused_on_cuda or self.outputs or self.rounded_into or self.met):
            self._tell_numbers(log)
        if self.crash:
            log.add(self.kind, "error", self.place, self.module, f"{self.what}; {self.crash}", self.fix)
        elif self.refused_on_cuda:
            text = f"{self.what}; {self.refused_on_cuda} takes it beside float16 on the CPU, but CUDA's kernels want one dtype"
            log.add(self.kind, "error", self.place, self.module, text, self.fix)
        elif self.outputs:
            self._tell_output(log, harmless=harmless)
        elif self.rounded_into and not harmless:
            text = f"{self.what}; {self.rounded_into} computes in float32 and rounds into a float16 tensor in place"
            log.add(self.kind, "note", self.place, self.module, text, self.fix)
        elif self.met and not harmless:
            text = f"{self.what}; from {self.met} on this is computed in float32, until it is rounded back or dropped"
            log.add(self.kind, "note", self.place, self.module, text, self.fix)
        elif self.joined and self.kind in ("factory", "hard_coded_dtype", "attribute"):
            text = f"{self.what} without dimensions; {self.joined} takes float16's dtype only because it has none"
            log.add(self.kind, "note", self.place, self.module, text, self.fix)

    def _tell_numbers(self, log: Log) -> None:
        for number, place, module in self.beyond:
            text = f"{number:g} does not fit float16 (largest {FP16_MAX:g}), which this tensor becomes once its dtype is mended"
            log.add("constant", "error", place, module, text, "mask_value(x)" if number < 0 else "finfo(x).max")

    def _tell_output(self, log: Log, *, harmless: bool) -> None:
        outputs = ", ".join(dict.fromkeys(self.outputs))
        if self.met_before_output:
            text = f"{self.what}; it meets float16 in {self.met}, and everything from there to {outputs} is float32"
            log.add(self.kind, "warning", self.place, self.module, text, self.fix)
        else:
            text = f"{self.what}, and {outputs} is float32 in a float16 model"
            log.add(self.kind, "note" if harmless else "warning", self.place, self.module, text, self.fix)


class Origin(NamedTuple):
    """A wide tensor's history: its birth, and whether float16 took part since."""

    birth: Birth
    met: bool = False
