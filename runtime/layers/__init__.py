"""The user's model as a list of layers, of which this rank holds some: parameters, optimizer, state."""
