"""Loops that keep their state at some steps only and recompute the steps between."""
