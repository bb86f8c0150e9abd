"""Cluster files: a machine as it was measured, read and written."""
