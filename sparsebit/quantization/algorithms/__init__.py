"""Methods that make a quantized model better, one a file."""
