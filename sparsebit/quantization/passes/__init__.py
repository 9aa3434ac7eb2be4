"""Passes that know about quantizers."""
