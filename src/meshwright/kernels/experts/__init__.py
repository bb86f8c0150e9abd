"""Products of a mixture of experts, rows sorted by expert."""
