"""The ``ftd`` command: each module adds its own with ``register(app)`` and imports what is heavy inside."""
