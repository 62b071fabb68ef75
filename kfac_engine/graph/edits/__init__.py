"""Edits of a model in its own form: another head, adapters, and adapters folded into weights."""
