"""Process that speaks HTTP. It loads no torch."""
