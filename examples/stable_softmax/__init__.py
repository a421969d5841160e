"""Softmax, log-softmax and cross-entropy that hold in float16, beside the textbook ones that do not.

    python -m examples.stable_softmax
    python -m examples.stable_softmax --json

float16 ends at 65504 and has nothing below 6e-8, so that `exp` overflows above 11.09 and vanishes below -17.3: a textbook
softmax gives NaN for a logit of 12, and the logarithm of a textbook softmax gives minus infinity for a class that is 18 behind.
The functions in `stable.py` subtract the row's largest logit first and compute in float32; the demonstration prints how far
each way is from float64, in units of float16's own resolution.
"""
