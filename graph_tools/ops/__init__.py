"""Facts about one op: its kind, its outputs' bytes, the buffers it shares, the device it runs on.

Every answer comes from the op's type, its definition and its shapes, never from its name. The rooms
above use these answers. They look at an op's type only for rules of their own.
"""
