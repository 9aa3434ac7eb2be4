"""A file against its simulation, against its float twin, or against its own definition."""
