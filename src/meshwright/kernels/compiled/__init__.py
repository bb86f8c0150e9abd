"""Loops over rows in C, for steps of serving on a CPU; `library` compiles and calls them."""
