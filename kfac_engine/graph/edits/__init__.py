"""Edits a model and keeps the form of its file: replaces heads, adds and merges adapters."""
