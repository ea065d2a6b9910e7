"""Map-style data sets and collators for common kinds of training data.

A job file's ``[data]`` table makes them from plain arguments, and a training function may use them like any
other data set. The modules ``documents``, ``tokenizing`` and ``cache`` do not import torch, because the
command ``ftd data`` uses them as well.
"""
