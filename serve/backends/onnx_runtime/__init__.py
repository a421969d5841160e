"""ONNX files on ONNX Runtime: fp16 on CUDA, upcast to fp32 on the CPU."""
