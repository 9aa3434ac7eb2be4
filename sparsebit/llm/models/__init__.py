"""The float model: its architecture, folder, tokenizer, and the text that calibrates it."""
