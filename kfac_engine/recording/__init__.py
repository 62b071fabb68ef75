"""Arrays that record ONNX nodes: formulas that are written for arrays write files."""
