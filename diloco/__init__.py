"""Decoupled DiLoCo: asynchronous, fault-isolated training islands in JAX.

Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training",
arXiv 2604.21428.
"""

__version__ = "0.1.0"
