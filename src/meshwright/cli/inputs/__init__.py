"""Options and arguments that several verbs share."""
