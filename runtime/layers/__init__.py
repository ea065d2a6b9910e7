"""The user's model as a list of layers: code that runs them, and the parameters, optimizer and state of the
layers that this rank holds.
"""
