"""Sweeps: grids of runs or simulations, for `diloco sweep`."""
