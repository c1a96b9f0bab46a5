"""Measured claims: memory, time and simulation error of the package, printed beside their bars."""
