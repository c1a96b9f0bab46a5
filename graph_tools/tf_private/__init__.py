"""Every private name of TensorFlow that this project uses, and the reason for each.

Nothing else imports from ``tensorflow.python``. A new version of TensorFlow is therefore supported
by changes in this room alone.
"""
