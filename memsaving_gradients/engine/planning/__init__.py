"""Plans for gradients that TensorFlow built, found in one of three ways: by a mode, within limits,
or from a saved plan."""
