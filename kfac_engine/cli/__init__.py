"""Implements the command line.

Modules here import click and nothing slow at the top: ``--help`` and mistyped options answer at
once.
"""
