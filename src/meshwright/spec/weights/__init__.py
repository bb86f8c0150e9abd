"""Parameters of a shape: names, sizes, parts on a rank, codes, and FLOP."""
