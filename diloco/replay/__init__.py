"""Re-execution of a run from its configuration, seeds and tape."""
