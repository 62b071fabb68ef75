"""Evaluation of models by ONNX Runtime."""
