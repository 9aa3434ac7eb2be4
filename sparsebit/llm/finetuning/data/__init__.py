"""Instructions as token samples, packed to full length, and their loss."""
