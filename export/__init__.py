"""From a PyTorch or ONNX model to a verified float16 ONNX model.

`halfserve` exports the public names.
"""
