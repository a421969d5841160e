"""ONNX files of any size: read, walked and written a tensor at a time, whole or not at all."""
