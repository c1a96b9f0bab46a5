"""Notes, warnings and a progress bar for the user who asks for gradients."""
