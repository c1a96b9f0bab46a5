"""Training with weights and slots in 16 bits.

Keras' policies store weights in the type that they compute in (``"bfloat16"``, ``"float16"``) or in
``float32`` (``"mixed_…"``). In 16 bits, updates that are small compared to a weight or to a slow
average are rounded away, and training stops. This package has two remedies that keep the memory
low: stochastic rounding and compensated (Kahan) summation, around Keras' optimizers.
"""
