"""Smaller models from trained ones.

    stream               weights of a model, one matrix at a time -> a folder with codes
    calibrated_model     methods that need text, block by block (calibrated_block, finished_blocks), matrix by matrix
                         (calibrated_methods): gptq; input_scales (AWQ, SmoothQuant), folded in by input_folds
    layer_inputs         activations of a model on text, their statistics, and which columns are outliers
    bit_budget           bits of each matrix under a budget of bytes, chosen by sensitivity
    quality              predictions before and after, compared on held-out text
    distill_student      a student with a subset of its teacher's layers
    distill_sequences    a file of a teacher's answers

Methods without data are in kernels/quantized/quantize.py. Add a method that needs the activations of each matrix next
to `gptq`; it receives what `layer_inputs.Inputs` gathers. Add a file format to the table in `formats/quantized`.
"""
