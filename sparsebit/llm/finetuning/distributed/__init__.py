"""Training in several processes: pipeline stages or sharded states."""
