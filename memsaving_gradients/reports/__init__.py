"""Seeing: plans and explanations as tables, figures, pages and TensorBoard events.

Nothing here is imported before it is asked for: pandas and matplotlib are the extra ``plot``, and
take longer to import than most plans to make.
"""
