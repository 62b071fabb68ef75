"""Uses of the curvature of a trained model: saliencies, pruning, merging of models."""
