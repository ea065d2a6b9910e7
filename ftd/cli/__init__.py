"""The ``ftd`` command. Each module registers its commands with ``register(app)`` and imports heavy modules
inside them.
"""
