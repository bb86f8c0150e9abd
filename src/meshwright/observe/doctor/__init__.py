"""Checks whether this machine or cluster is fit to train, each with a finding and advice."""
