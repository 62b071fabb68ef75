"""Differentiates ONNX graphs in reverse mode; the gradients are ONNX graphs as well.

An operator has a derivative rule (``rules``) if the rule is faster than the derivative of a rewrite
in other operators; otherwise it has a rewrite (``lowering``).
"""
