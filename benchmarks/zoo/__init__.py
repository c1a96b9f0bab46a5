"""Networks of other libraries: keras.applications, KerasHub, Hugging Face and Keras 2."""
