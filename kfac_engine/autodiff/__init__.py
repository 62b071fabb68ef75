"""Reverse-mode differentiation, ONNX in and ONNX out, run by ONNX Runtime."""
