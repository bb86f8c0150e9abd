"""Whether all ranks are alive and move: rendezvous, heartbeats, watchdog, and which rank is to blame."""
