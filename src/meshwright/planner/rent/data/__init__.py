"""Table of prices."""
