"""Writes a model's gradients as an ONNX file."""
