"""Statistics with moving averages: what curvature blocks are made of."""
