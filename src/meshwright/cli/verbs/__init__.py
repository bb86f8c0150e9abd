"""The verbs, one file each: they parse options, call the Python interface and print its answer."""
