"""Checks of the engine's results on a model and a batch of the user, against definitions."""
