"""Runs within one process: each role is threads of it."""
