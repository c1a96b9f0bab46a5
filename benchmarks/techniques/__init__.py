"""One experiment a technique: encodings, offloading, loops, attention, microbatches, sparsity."""
