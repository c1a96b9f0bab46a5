"""What one op is: its kind, its outputs' bytes, the buffers it shares, the device it runs on.

Every answer comes from the op's type, its definition and its shapes, never from its name. The rooms
above read these answers and look at no op types of their own.
"""
