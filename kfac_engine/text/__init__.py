"""Texts that show objects to people."""
