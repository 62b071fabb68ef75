"""The command line, one file a command.

Modules here import click and nothing slow at the top: ``--help`` and mistyped options answer at
once.
"""
