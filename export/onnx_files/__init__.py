"""ONNX files of any size: opened, checked and written one tensor at a time."""
