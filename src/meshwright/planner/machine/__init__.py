"""Cluster files: measured machines, read and written."""
