"""The command line; each command has a file.

Modules here import click and nothing slow at the top: ``--help`` and mistyped options answer at
once.
"""
