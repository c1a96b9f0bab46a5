"""The same models trained by plain TensorFlow, by its own means against memory, and by ours."""
