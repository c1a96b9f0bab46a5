"""A TensorFlow graph as arrays and as a networkx DAG, its order, and its separators.

`capture` collects the ops that given tensors need. Every analysis in the layers above works on the
result and not on TensorFlow's objects.
"""
