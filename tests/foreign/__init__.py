"""Tests that others wrote, run with gradients that recompute: a test that passes with plain
gradients must pass with these.

``python -m tests.foreign`` runs the tests that Keras ships (``make test-foreign``).
`tests.foreign.plugin` is a plugin of pytest that runs any tests of TensorFlow code in this way.
"""
