"""Declarations of training software, one module each."""
