"""Other projects' training software: layouts offered, options by name, and files, read and written."""
