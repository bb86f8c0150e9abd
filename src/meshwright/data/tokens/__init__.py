"""Tokenizers: text becomes tokens."""
