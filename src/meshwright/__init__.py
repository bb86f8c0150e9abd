"""Meshwright plans, trains, shrinks and serves transformer language models."""

__version__ = "0.1.0"
