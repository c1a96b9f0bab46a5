"""One technique an experiment: encodings, offloading, loops, attention, microbatches, sparsity."""
