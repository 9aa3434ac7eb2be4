"""GGUF: what llama.cpp reads."""
