"""What a layer, a stage and an exchange cost on one rank: FLOP, seconds, bytes kept for the backward pass."""
