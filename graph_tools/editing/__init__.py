"""Changes to a TensorFlow graph: copies of ops, redirected inputs, identities that compilers leave
alone.

A `Rewiring` remembers every edit. It can be undone, and TensorFlow sees the graph as it was built
whenever it differentiates it again.
"""
