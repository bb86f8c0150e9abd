"""Norms and dropout."""
