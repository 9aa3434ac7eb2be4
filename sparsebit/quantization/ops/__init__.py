"""The modules that run quantized ops, and the registration of a user's own."""
