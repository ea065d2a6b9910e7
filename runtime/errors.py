"""The error of everything that a user's training function can get wrong."""


class TrainingError(ValueError):
    """The training function, or what it returned, cannot be used; the message says what to change."""
