"""Runs data through graphs in bounded memory: batches, blocks, stores, processes."""
