"""Running the smaller model, also on paths that the example does not take, before a group counts."""
