"""Records array formulas as ONNX nodes."""
