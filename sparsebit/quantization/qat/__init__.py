"""Quantization-aware training: freezing, parameter groups, sharding, CUDA graphs of a step."""
