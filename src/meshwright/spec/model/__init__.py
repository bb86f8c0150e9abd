"""Shapes of models, adapters, and forms of their weights."""
