"""Comparison of plan, dry run and measurement, row by row."""
