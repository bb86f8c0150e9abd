"""Smaller models from trained ones.

    stream            weights of a model, one matrix at a time -> a folder with codes
    calibrated_model  methods that need text, block by block (block_model, calibrated_block, finished_blocks):
                      gptq; input_scales (AWQ, SmoothQuant), folded into the model by input_folds; input_statistics
    clipping          narrower ranges of groups. Methods without data are in kernels/quantized/quantize.py
    layer_inputs      activations of a model on text, and which columns are outliers
    bit_budget        bits of each matrix under a budget of bytes, chosen by sensitivity
    quality           predictions before and after, compared on held-out text
    distill_student   a student with a subset of its teacher's layers
    distill_sequences a file of a teacher's answers

Add a method that needs the activations of each matrix beside `gptq`; it receives what `input_statistics` gathers. Add
a file format to the table in `formats/quantized`.
"""
