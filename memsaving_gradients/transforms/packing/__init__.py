"""Residuals of which the backward pass reads only a part, stored as bits or small integers.

The result is exact: the stored part determines everything that the backward pass reads.
"""
