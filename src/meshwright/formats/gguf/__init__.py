"""GGUF files, which llama.cpp and Ollama run, written and read.

header      the bytes of a file before its tensors, checked before anything is allocated; files in parts
metadata    a shape as keys, and back; names of tensors, and the order of their rows
vocabulary  a tokenizer as keys, and back; how text is cut into words before that
model       a file as a model: shape, tokenizer, weights one at a time; new files, which appear complete or not at all
"""
