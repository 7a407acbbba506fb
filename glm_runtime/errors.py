"""Errors of the operator's input; imports nothing, so that a client need not load what a server does."""

from __future__ import annotations


class ConfigError(ValueError):
    """Bad input of the operator: printed as one line, exit code 2."""
