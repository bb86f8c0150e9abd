"""Declaration of a training software: its options, its limits, and the facts of a plan that they state."""
