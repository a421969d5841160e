"""Where float16 ends (IEEE 754 binary16: 5 exponent bits, 10 fraction bits)."""

from __future__ import annotations

LARGEST = 65504.0
SMALLEST_NORMAL = 2.0**-14
SMALLEST_SUBNORMAL = 2.0**-24
