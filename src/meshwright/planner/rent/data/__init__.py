"""Tables of prices and watts."""
