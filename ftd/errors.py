"""Every error that ftd raises on purpose. The branch of the tree tells who has to act.

FtdError                      exit code 1
├── ConfigurationError        exit code 2   a wrong configuration: names the field and what to write instead
│   ├── IncompleteError                     the counterpart of a given key is missing
│   └── ConfigurationErrors                 all errors of a configuration
├── PeerError                 exit code 1   a message, node or broker broke the contract
│   ├── WireError                           malformed, oversized or misaddressed payload
│   ├── RequestRejected                     the coordinator or a node rejected a request
│   └── UnreachableError      exit code 3   no broker, or no coordinator, answers
├── JournalError              exit code 1   durable state cannot be stored (disk full, file in use)
├── CheckpointError           exit code 1   a checkpoint is corrupt, or its location does not work
└── InternalError             exit code 1   a bug of ftd

The planner is a library by itself and has its own small tree (``planner.errors``). The modules that call it
(``ftd.coordinator.planning``, ``ftd.cli.plan``) convert those errors into these.
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

    def __init__(self, errors: tuple[ConfigurationError, ...]) -> None:
        super().__init__("; ".join(str(error) for error in errors))
        self._errors = errors

    @property
    def errors(self) -> tuple[ConfigurationError, ...]:
        return self._errors


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
