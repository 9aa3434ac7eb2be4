"""The search: the goal, the ladder of rungs, the run folder, the conclusion."""
