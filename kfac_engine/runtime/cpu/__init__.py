"""Graph rewrites and sessions for a faster evaluation on a CPU."""
