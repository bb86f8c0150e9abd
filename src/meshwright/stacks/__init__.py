"""Training software of others: the layouts that each offers, its options by name, its files written and read."""
