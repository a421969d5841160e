"""OpenVINO on the CPU: its own model files, and ONNX files."""
