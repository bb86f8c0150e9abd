"""Rows of a step: packed tokens, prepared layers, and adapters that differ from row to row."""
