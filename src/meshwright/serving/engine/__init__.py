"""Many requests to one model at once: paged keys and values, prefix cache, continuous batching.

`blocks` and `scheduler` decide, without torch; `runner` computes; `serving_engine` joins them.
"""
