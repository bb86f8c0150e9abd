"""Planned, dry run and measured, row by row."""
