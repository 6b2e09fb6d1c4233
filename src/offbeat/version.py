"""The version, for whoever cannot import the whole package."""

__version__ = "0.1.0"
