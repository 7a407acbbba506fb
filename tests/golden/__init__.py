"""Golden vectors against our functions: ``python -m tests.golden DIR [--set NAME]``."""
