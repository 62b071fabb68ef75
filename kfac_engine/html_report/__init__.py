"""Writes an HTML report of one training run, with charts and tables."""
