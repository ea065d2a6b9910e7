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
    """Base of all errors of ftd; ``str()`` is a sentence for the user."""

    exit_code = 1


class ConfigurationError(FtdError):
    """Wrong file, option or job. It names the field, the problem and a remedy."""

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
        """The single errors, one per problem."""
        return (self,)


class IncompleteError(ConfigurationError):
    """Missing counterpart of a key that is present. It may also be there under a misspelled name."""


class ConfigurationErrors(ConfigurationError):
    """All problems of a configuration, reported together."""

    def __init__(self, mistakes: tuple[ConfigurationError, ...]) -> None:
        super().__init__("; ".join(str(mistake) for mistake in mistakes))
        self._mistakes = mistakes

    @property
    def errors(self) -> tuple[ConfigurationError, ...]:
        return self._mistakes


class PeerError(FtdError):
    """Violation of the contract by something outside this process."""


class WireError(PeerError):
    """Payload that is not a valid message. The receiver drops it, reports it, and continues."""


class RequestRejected(PeerError):
    """Negative answer of the coordinator or a node to a request; the text is the reason."""


class UnreachableError(PeerError):
    """Missing answer: the broker does not run, it rejects this client, or no coordinator is connected to it."""

    exit_code = 3


class JournalError(FtdError):
    """Failure to read or write the journal. A coordinator must not continue without it."""


class CheckpointError(FtdError):
    """Missing or corrupt persistent checkpoint, or a location that does not work."""


class InternalError(FtdError):
    """State that is impossible if our code is correct. Please report it with the log."""
