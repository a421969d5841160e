"""Tensors made inside `forward` that take dtype and device from a tensor already there."""
