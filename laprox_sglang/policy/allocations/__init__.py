"""Allocations: one file each, named in policy/registry.py."""
