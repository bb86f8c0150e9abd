"""Files of options as text: YAML, JSON, TOML, shell and Python, written with comments and read with line numbers."""
