"""What a run would do, does and did: dry run, profile, comparison, report, calibration and checks."""
