"""Parts that all HTML pages about runs, data and quality share."""

from html import escape
from importlib.resources import files

HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
"""


def report_style() -> str:
    """Return the style of all pages about runs."""
    return (files("meshwright.interface.answers") / "page.css").read_text(encoding="utf-8")


def section(title: str, inner: str) -> str:
    """Return a titled section of a page."""
    return f"<section><h2>{escape(title)}</h2>{inner}</section>"
