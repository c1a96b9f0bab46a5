"""One gradient computation, from the user's request to rewired ops.

The engine captures what TensorFlow built, asks a planner, rewrites the graph, and checks the plan
as the executor will run it. It keeps what is known of each graph and of the whole training step.
"""
