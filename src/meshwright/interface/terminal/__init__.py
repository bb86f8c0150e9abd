"""Text for a terminal: lines of any width, help, JSON on stdout."""
