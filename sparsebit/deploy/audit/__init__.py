"""Which layers of a file run in integers, which do not and why, and the time that they take."""
