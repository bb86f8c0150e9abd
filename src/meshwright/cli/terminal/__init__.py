"""Terminal output: tables, charts, the live panel, streamed text."""
