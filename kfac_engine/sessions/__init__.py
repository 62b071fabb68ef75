"""Runs ONNX Runtime sessions on the CPU and on a GPU."""
