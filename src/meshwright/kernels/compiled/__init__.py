"""Loops in C for a CPU: of rows, for steps of serving (`library` compiles and calls them), and attention of whole
sequences, for training (`sequence_attention`)."""
