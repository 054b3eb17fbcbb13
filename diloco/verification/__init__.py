"""The protocol simulator: both decision cores in a world that misbehaves."""
