"""One layout as a whole: memory, time and traffic of a step, and what follows from them."""
