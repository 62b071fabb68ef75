"""Reads, analyses and writes ONNX models; only this package uses protobuf."""
