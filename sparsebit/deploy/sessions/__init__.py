"""Runtimes that execute a file: sessions, inputs, timing."""
