"""GGUF files, which llama.cpp and Ollama run: written and read.

gguf_header     the bytes of a file before its tensors, checked before anything is allocated
gguf_writer     the same laid out, and a file that appears whole or not at all
gguf_names      whose tensor is whose, and in which order its rows are
gguf_metadata   a shape as keys, and back
gguf_vocabulary a tokenizer as keys, and back; gguf_words: how text is cut into words before that
gguf_model      a file as a model: shape, tokenizer, weights one at a time
"""
