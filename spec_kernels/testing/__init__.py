"""Comparison and timing shared by tests and benchmarks. Nothing in the package imports it."""
