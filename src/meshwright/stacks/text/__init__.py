"""Options as text, in each form of configuration file: read with line numbers, written with meanings."""
