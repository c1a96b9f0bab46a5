"""Loops that keep their state at some steps only and run the steps between again."""
