"""Tables, files and records that a verb leaves."""
