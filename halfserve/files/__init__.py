"""File operations that all stages share: atomic writes, object storage, and ONNX files read without the onnx package."""
