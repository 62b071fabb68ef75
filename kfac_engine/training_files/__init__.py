"""Writes a model's training step as plain ONNX files, which any ONNX Runtime executes."""
