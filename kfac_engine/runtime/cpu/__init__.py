"""Rewrites graphs and runs sessions for faster evaluation on a CPU."""
