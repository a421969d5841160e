"""One leaking model and its mended twin for each failure mode, by kind of leak."""
