"""From gradients that TensorFlow built to a plan for them, in one of three ways: by a mode, within
limits, or as a saved plan says."""
