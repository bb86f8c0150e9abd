"""Files of the page."""
