"""Make TensorFlow follow a schedule.

Clones recompute forward ops, gates hold clones back until their triggers ran, and further edges
keep originals in the schedule's order. One pass makes the clones; what holds them back has two
forms (:mod:`memsaving_gradients.rewriting.backends`): control edges for TensorFlow's executor,
conditionals for XLA.
"""
