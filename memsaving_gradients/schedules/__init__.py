"""The planners' language: training graphs, schedules, and the simulation of one.

Nothing here imports TensorFlow. A `Schedule` lists which op runs when and which copy of each input it reads.
"""
