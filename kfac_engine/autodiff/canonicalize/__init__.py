"""Rewrites products with weights to one form."""
