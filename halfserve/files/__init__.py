"""What all stages do with files: atomic writes, object storage, and ONNX files read without the onnx package."""
