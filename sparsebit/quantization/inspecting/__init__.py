"""Errors per layer, gains in accuracy, diagrams."""
