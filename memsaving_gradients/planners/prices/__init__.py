"""Plans by prices. Memory has a price at each event, in seconds a byte. One minimum cut chooses the
values that are worth their bytes, and prices rise where the plan is above its budget.
"""
