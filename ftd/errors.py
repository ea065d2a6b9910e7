"""Every error that ftd raises on purpose. The branch tells whose turn it is to act.

FtdError                      exit code 1
├── ConfigurationError        exit code 2   you configured it wrong: a field, and what to write instead
│   ├── IncompleteError                     something that goes with what is written is missing
│   └── ConfigurationErrors                     all that is wrong with a file
├── PeerError                 exit code 1   a peer misbehaved: a message, a node, a broker
│   ├── WireError                           malformed, oversized or misaddressed payload
│   ├── RequestRejected                      the coordinator said no
│   └── Unreachable           exit code 3   no broker, or no coordinator, answers
├── JournalError              exit code 1   durable state cannot be kept (disk full, file in use)
├── CheckpointError           exit code 1   a checkpoint is damaged, or its place cannot be read or written
└── InternalError             exit code 1   we have a bug

The planner has its own small tree (``planner.errors``), because it is a library by itself; the edge that
calls it (``ftd.coordinator.planning``, ``ftd.cli.plan``) turns those into these.
"""


class FtdError(Exception):
    """Base of all; ``str()`` is a sentence for the user."""

    exit_code = 1


class ConfigurationError(FtdError):
    """A file, an option or a job is wrong. Names the field, says what is wrong, and what would work."""

    exit_code = 2

    def __init__(self, problem: str, *, field: str | None = None, remedy: str | None = None) -> None:
        self.problem = problem
        self.field = field
        self.remedy = remedy
        where = f"{field}: " if field else ""
        how = f" ({remedy})" if remedy else ""
        super().__init__(f"{where}{problem}{how}")

    @property
    def errors(self) -> tuple["ConfigurationError", ...]:
        """One by one, what is wrong."""
        return (self,)


class IncompleteError(ConfigurationError):
    """Something goes with what is there, and is not there itself; or it is, misspelt."""


class ConfigurationErrors(ConfigurationError):
    """All that is wrong, told at once."""

    def __init__(self, mistakes: tuple[ConfigurationError, ...]) -> None:
        super().__init__("; ".join(str(mistake) for mistake in mistakes))
        self._mistakes = mistakes

    @property
    def errors(self) -> tuple[ConfigurationError, ...]:
        return self._mistakes


class PeerError(FtdError):
    """Something outside this process broke the contract."""


class WireError(PeerError):
    """A payload that is no message of ours. The receiver drops it, says so, and goes on."""


class RequestRejected(PeerError):
    """The coordinator or a node answered a request with no; the text is its reason."""


class UnreachableError(PeerError):
    """Nobody answers: the broker is not there, refuses us, or no coordinator listens behind it."""

    exit_code = 3


class JournalError(FtdError):
    """The journal cannot be read or written. A coordinator must not go on without it."""


class CheckpointError(FtdError):
    """A persistent checkpoint is not there, is damaged, or its directory or URL does not work."""


class InternalError(FtdError):
    """A state that cannot be, if our code is right. Please report it with the log."""
