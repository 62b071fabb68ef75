"""Estimates how single training examples influence a trained model's predictions."""
