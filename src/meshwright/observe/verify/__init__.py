"""Comparison of layouts with one device: fixed layouts, and random ones."""
