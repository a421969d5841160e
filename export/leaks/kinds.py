"""What each kind of finding means."""

from __future__ import annotations

KINDS = {
    "attribute": "a tensor that was assigned, not registered: .half(), .to(device) and state_dict pass it over",
    "autocast": "an autocast region inside forward",
    "complex": "a complex buffer: it has no float16 form, and ONNX has none at all",
    "constant": "a number beyond float16's range: a mask of -1e9, finfo(torch.float32).min",
    "crash": "the float16 model raises an exception that is not about mixed dtypes",
    "epsilon": "a number that float16 rounds to 0 or holds with few digits",
    "export": "torch.export cannot capture the float16 model, so that nothing was compared",
    "export_dtype": "the captured graph has another dtype than eager mode",
    "factory": "torch.zeros and its like without dtype",
    "hard_coded_dtype": "dtype=torch.float32, or a cast to it, where nothing asks for float32",
    "infinite_mask": "-inf as a mask",
    "integer_promotion": "arithmetic that turns whole numbers into float32",
    "kept": "a weight that stays float32, read past the forward of the module that owns it",
    "kept_float32": "a buffer or parameter that float16 cannot hold; to_half keeps it",
    "not_reached": "a leak in a line that the inputs did not reach",
    "numbers": "a function that makes float32 out of Python's numbers",
    "numpy": "an array that enters as float32 or float64",
    "outermost_table": "a table that must stay float32, in the outermost module",
    "outside": "a float32 tensor that is global, or made where torch does not show it",
    "overflow": "finite numbers that become infinite or NaN",
    "position": "positions or angles that float16 cannot tell apart",
    "round_trip": "values that leave torch for numpy or Python",
    "squares": "a sum or mean of squares in float16",
    "upcast": "float16 raised to float32 that is not rounded back",
    "variance": "E[x^2] - E[x]^2 in float16",
}
