"""The command line: ``python -m memsaving_gradients explain TARGET``.

`starting` reads the arguments and silences TensorFlow's log before TensorFlow is imported.
`targets` and `models` find a training step and prepare it. `explaining` explains it and plans for
it; no step is run.
"""
