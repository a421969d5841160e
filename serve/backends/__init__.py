"""Backends: ONNX Runtime, OpenVINO, PyTorch and Python."""
