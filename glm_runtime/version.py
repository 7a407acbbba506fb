"""Version of the runtime, compared between launcher and schedulers."""

__version__ = "0.1.0"
