"""Changes to a TensorFlow graph: copies of ops, redirected inputs, identities that compilers leave
alone.

A `Rewiring` remembers every edit and can undo it. Whenever TensorFlow differentiates the graph
again, it sees the graph as it was built.
"""
