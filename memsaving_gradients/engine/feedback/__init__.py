"""Notes, warnings and a progress bar for whoever asks for gradients."""
