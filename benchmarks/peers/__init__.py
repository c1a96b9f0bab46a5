"""The same models trained by plain TensorFlow, by its own ways to save memory, and by ours."""
