"""Evaluates and differentiates models with ONNX Runtime."""
