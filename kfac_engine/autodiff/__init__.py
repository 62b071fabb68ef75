"""Reverse-mode differentiation, which converts ONNX graphs to ONNX graphs of gradients.

An operator has a derivative rule (``rules``) if the rule is faster than the derivative of a rewrite
in other operators; otherwise it has a rewrite (``lowering``).
"""
