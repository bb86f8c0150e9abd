"""Device kernels in Triton, by what they read: rows, codes, logits, caches, states of the optimizer.

`kernels.chooser` decides where they run.

Nothing here is imported on a machine without a driver. Rules of the code: loaded numbers become fp32 at once (the
interpreter computes no bf16), no atomics (the same inputs give the same bits), and each function has a slow reference
in `meshwright.kernels`.
"""
