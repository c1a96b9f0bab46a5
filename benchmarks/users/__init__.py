"""Programs as users write them: small steps of many kinds, with measurements of their budgets.

Each module holds programs of one field; a program is a function that returns a `Program`.
`PROGRAMS` in `experiment` names them all. Their steps use tapes, loops and updates of their own,
and none uses this library.
"""
