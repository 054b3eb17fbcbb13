"""Flax models that tasks train."""
