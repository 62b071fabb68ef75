"""Computes saliencies, prunes a model and merges models, from the models' curvature."""
