"""Founding works, one module a work, and their figures beside ours."""
