"""Divides the work among several processes, and exchanges arrays and errors between them."""
