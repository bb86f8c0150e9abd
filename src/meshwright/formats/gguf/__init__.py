"""GGUF files, which llama.cpp and Ollama run, written and read.

header      the bytes of a file before its tensors, checked before anything is allocated; files in parts
writer      the layout of a new file, which appears complete or not at all
names       names of tensors, and the order of their rows
metadata    a shape as keys, and back
vocabulary  a tokenizer as keys, and back; words: how text is cut into words before that
model       a file as a model: shape, tokenizer, weights one at a time
"""
