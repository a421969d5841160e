"""Backends: ONNX Runtime and PyTorch."""
