"""Other people's training software: the layouts each offers, its options by name, its files written and read."""
