"""The version of the package and of what it writes into results."""

__version__ = "0.1.0"
