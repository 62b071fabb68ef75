"""Predictive distributions: loss, samples, gradient, Fisher and its factors."""
