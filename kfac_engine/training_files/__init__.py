"""The training step of a model as plain ONNX files, which any ONNX Runtime executes."""
