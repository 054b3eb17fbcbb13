"""Fleets for `diloco plan --fleet=...`."""
