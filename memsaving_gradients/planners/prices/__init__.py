"""Plans by prices: bytes of memory cost time at each event, one minimum cut chooses what pays for
its bytes, and the prices follow from where the plan is above its budget.
"""
