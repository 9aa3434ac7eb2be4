"""Reads configs: YAML -> typed, frozen, checked values. Import from the defining files."""
