"""Compiled CPU code: number formats and vector functions for numba, and torch's own threads to run it on."""
