"""The same models trained by plain TensorFlow, by what TensorFlow and Keras offer against memory, and by ours, side by side."""
