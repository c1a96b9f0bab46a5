"""Programs that XLA compiles: their optimized instructions, their schedule, and their buffers.

XLA compiles a function's graph in this process and returns the program. The room says how many
bytes XLA assigns, which buffers are alive at the peak, and which TensorFlow op each comes from.
"""
