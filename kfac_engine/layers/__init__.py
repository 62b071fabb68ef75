"""Finds the layers of a graph, and describes how their tensors become rows of features."""
