"""Checks an engine's results on the user's model and batch against definitions."""
