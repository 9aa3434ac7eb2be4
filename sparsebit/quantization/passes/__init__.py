"""Passes that plan, place and attach quantizers."""
