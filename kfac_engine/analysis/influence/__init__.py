"""Influence: what single examples did to the predictions of a trained model."""
