"""The converter of ONNX models from float32 to float16: types, planning, repairs, casts and the report."""
