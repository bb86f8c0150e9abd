"""Which devices to rent for a run, how many, for how long, and for how much; simulated with its failures."""
