"""Gradients of a model as an ONNX file."""
