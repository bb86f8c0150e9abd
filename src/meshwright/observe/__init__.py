"""Dry run, profile, check of communication, comparison with the plan, and the oracle on one device."""
