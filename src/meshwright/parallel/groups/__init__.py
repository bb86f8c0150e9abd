"""Groups of ranks: the mesh, its collectives, their traffic, and agreement of all ranks."""
