"""Command-line options that several verbs take."""
