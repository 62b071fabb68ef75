"""K-FAC for one model: gradients, curvature statistics and preconditioned gradients."""
