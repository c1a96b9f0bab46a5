"""One gradient computation, from the user's request to rewired ops.

The engine captures the ops that TensorFlow built, asks a planner, rewrites the graph, and simulates
the plan in the executor's order. It keeps the state of each graph and of the whole training step.
"""
