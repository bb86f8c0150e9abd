"""Dry run, profile, comparison, report, calibration and checks of runs."""
