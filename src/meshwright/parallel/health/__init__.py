"""Liveness of all ranks: rendezvous, heartbeats, watchdog, and the rank that is to blame."""
