"""Predictions of how TensorFlow's graph optimizer will fold, reorder and merge ops.

A rewrite is exact only if an original and its copy are optimized alike, so these modules predict
the optimizer before it runs.
"""
