"""Training: freezing, parameter groups, sharding, recorded steps."""
