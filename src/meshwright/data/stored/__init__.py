"""Token stores: shards of tokens that are encoded once, on any number of machines, and read while training."""
