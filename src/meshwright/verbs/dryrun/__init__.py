"""`meshwright dryrun`."""
