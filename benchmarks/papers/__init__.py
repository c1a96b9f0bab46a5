"""Founding works, one module a work, and their figures against ours."""
