"""Training with weights and slots in 16 bits.

Keras' policies store weights in the type that they compute in (``"bfloat16"``, ``"float16"``) or in
``float32`` (``"mixed_…"``). In 16 bits, an update that is small beside its weight is rounded away,
and so is what moves a slow average: optimizers stop. Two remedies that keep the memory are here,
stochastic rounding and compensated (Kahan) summation, around whatever optimizer there is.
"""
