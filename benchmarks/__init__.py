"""Measured claims: memory, time and simulation error of the package, printed with their bars."""
