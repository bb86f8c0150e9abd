"""Words, keywords and plans -> the Plan that a verb works on."""
