"""ONNX models as the engine sees them: the only package that knows protobuf."""
