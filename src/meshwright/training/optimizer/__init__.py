"""Optimizer: AdamW, Muon, narrow states, precision, learning rate, and skipped steps."""
