"""Tests that others wrote, run with gradients that recompute: what passes without must pass with
them.

``python -m tests.foreign`` runs the tests that Keras ships (``make test-foreign``).
`tests.foreign.plugin` is a plugin of pytest, and runs any tests of TensorFlow code so.
"""
