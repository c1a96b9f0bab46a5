"""The command line: ``python -m memsaving_gradients explain TARGET``.

What is wanted is read, and TensorFlow's log put aside, before TensorFlow is imported (`starting`);
what is to be explained is found and made ready (`targets`, `models`); then it is explained and
planned for, and nothing is run (`explaining`).
"""
