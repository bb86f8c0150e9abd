"""Formats of folders whose matrices are codes and scales. `table` lists them."""
