"""The ``ftd`` command. Each module has a command or a group of them, which ``main`` lists, and imports heavy
modules inside them.
"""
