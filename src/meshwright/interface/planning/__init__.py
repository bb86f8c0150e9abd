"""Words, keywords and plans -> the Plan that a verb works on; the layouts and the software that are asked for."""
