"""What XLA makes of a program: its optimized instructions, their schedule, and their buffers.

XLA writes all of it to a folder if a flag asks for it. The room reads those files, and says which
buffers are alive at the peak and which op of TensorFlow each of them comes from.
"""
