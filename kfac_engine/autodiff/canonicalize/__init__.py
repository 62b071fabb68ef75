"""Rewrites of products with weights into one form."""
