"""Layers found in a graph, and how their tensors become rows of the curvature formulas."""
