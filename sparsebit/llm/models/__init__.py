"""The float model: its architecture, folder and tokenizer, and the calibration text."""
