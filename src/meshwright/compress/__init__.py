"""Smaller models from trained ones.

    clipping     narrower ranges; what needs no data is in kernels/weight_codes.py
    layer_inputs activations of a model on text: which columns are outliers
    calibrated_model  methods that need text, block by block (block_model, calibrated_block, finished_blocks):
                 gptq; input_scales (AWQ, SmoothQuant) and input_folds, where they go; input_statistics
    bit_budget   how many bits each matrix has under a budget of bytes; sensitivity: what it goes by
    stream       a folder's weights, a matrix at a time -> a folder with codes
    quality      the model before and after on held-out text
    distill_student, distill_sequences   a student of some of its teacher's layers; a file of what a teacher answers

A method that needs activations of each matrix goes beside `gptq`, and takes what `input_statistics` gathers. A file
format goes into `model/quantized_formats`, and is added to its table.
"""
