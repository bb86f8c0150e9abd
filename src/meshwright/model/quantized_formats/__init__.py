"""Folders whose matrices are codes and scales: how each format holds them. The table is format_table.py."""
