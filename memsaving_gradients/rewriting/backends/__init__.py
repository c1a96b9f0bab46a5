"""The two forms in which a graph follows a schedule: for TensorFlow's executor, and for XLA.

The executor obeys control edges: gates hold clones back, and some originals wait, too. XLA obeys
data alone: conditionals hold back all that is in them.
"""
