"""State that a forward may read or change outside of parameters and buffers."""
