"""What runs a model: ONNX Runtime or PyTorch, told apart by the file."""
