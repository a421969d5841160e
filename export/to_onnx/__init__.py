"""A torch module as a checked ONNX model."""
