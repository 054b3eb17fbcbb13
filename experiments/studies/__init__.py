"""Studies of learning: sweeps of real training in virtual time."""
