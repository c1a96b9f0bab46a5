"""Lower bounds on the extra time of any plan within a budget.

A relaxation gives a bound in linear time; integer programs tighten it at the most crowded moments.
"""
