"""GGUF files, which llama.cpp and Ollama run, written and read.

gguf_header     the bytes of a file before its tensors, checked before anything is allocated; files in parts
gguf_writer     the layout of a new file, which appears complete or not at all
gguf_names      names of tensors, and the order of their rows
gguf_metadata   a shape as keys, and back
gguf_vocabulary a tokenizer as keys, and back; gguf_words: how text is cut into words before that
gguf_model      a file as a model: shape, tokenizer, weights one at a time
"""
