"""Programs as users write them: small steps of many kinds, their budgets measured.

Each module holds programs of one field, each a function that returns a `Program`; `PROGRAMS` in
`experiment` names them all. Their steps use tapes, loops and updates of their own, and none knows
of this library.
"""
