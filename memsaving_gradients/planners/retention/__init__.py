"""The retention problem: which values are kept, over which gaps between their uses.

`problem` states it and `simulate` evaluates decisions; `local_search` and `constraint_program`
solve it.
"""
