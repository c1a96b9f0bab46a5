"""Founding works, and their figures made again: one module a work, :mod:`.rows` for what they share, :mod:`.page` for what is printed and written."""
