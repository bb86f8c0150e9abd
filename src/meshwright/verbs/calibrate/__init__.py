"""`meshwright calibrate`."""
