"""One gradient computation that TensorFlow just built.

A site captures the computation, packs it, and undoes edits. Its simulations tell the bytes that the
step takes, and its search state holds the plans tried so far.
"""
