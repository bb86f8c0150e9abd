"""Loops in C for a CPU: for steps of serving (`library` compiles and calls them), and for training (`training_library`,
`sequence_attention`)."""
