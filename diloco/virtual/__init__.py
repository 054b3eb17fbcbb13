"""Runs in virtual time: real training in one thread, simulated clocks."""
