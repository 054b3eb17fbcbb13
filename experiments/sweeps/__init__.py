"""Grids for `diloco simulate --sweep=...`."""
