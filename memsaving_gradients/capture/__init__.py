"""A TensorFlow graph and its gradients become a `TrainingGraph`.

The modules decide which ops are forward and backward, which sums can be added up one by one, and
how residuals may be stored or offloaded.
"""
