"""Every op that the methods know."""
