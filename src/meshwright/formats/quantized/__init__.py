"""Formats of folders whose matrices are codes and scales. format_table.py lists them."""
