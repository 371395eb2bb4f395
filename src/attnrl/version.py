"""The version, apart from the package's own names, which would load the rest."""

__version__ = "0.1.0"
