"""The curvature of a trained model as a result: spectrum, products and samples."""
