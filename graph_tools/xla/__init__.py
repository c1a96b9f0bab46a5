"""What XLA makes of a program: its optimized instructions, their schedule, and their buffers.

XLA compiles a function's graph and tells in the process what came of it. The room says how many
bytes it assigns, which buffers are alive at the peak, and which op of TensorFlow each comes from.
"""
