"""Runs as one HTML page for offline use."""
