"""Cache of keys and values: blocks, prefixes, the host tier, and copies between host and device."""
