"""Seconds and workspace bytes of each op: estimated from shapes, or measured on this device and
cached.

Estimates follow a roofline model. Measurements run one kernel at a time.
"""
