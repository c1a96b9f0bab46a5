"""Plans and explanations as tables, figures, pages and TensorBoard events.

pandas and matplotlib, the extra ``plot``, are imported on first use only: importing them takes
longer than making most plans.
"""
