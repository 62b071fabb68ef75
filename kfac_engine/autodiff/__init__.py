"""Reverse-mode differentiation, which converts ONNX graphs to ONNX graphs of gradients."""
