"""Device kernels in Triton, one module an operation; `kernels.chooser` says where they are used.

Nothing here is imported on a machine without a driver. Rules of the code: what is loaded becomes fp32 at once (the
interpreter computes no bf16), no atomics (the same inputs give the same bits), and each function has a slow twin in
`meshwright.kernels`.
"""
