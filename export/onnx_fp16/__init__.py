"""A float32 ONNX model in float16: repaired first, kept in float32 where it must be, and told in a report."""
