"""Frozen objects that verbs answer with, as Python, JSON and HTML."""
