"""Mistakes in the use of a late device, which tests must find."""

from tests.helpers.late_device import LateEvent, LateRuntime, LateStream

ALWAYS_LATE = (1.0, 0.02)


class Unordered(LateStream):
    """An injected bug: streams do not wait for events."""

    def wait(self, event: LateEvent) -> None:
        pass


class Unawaited(LateEvent):
    """An injected bug: the host does not wait for events."""

    def synchronize(self) -> None:
        pass


class Impatient(LateStream):
    """An injected bug: the host does not wait for a stream."""

    def synchronize(self) -> None:
        pass


class Buggy(LateRuntime):
    """A device on which its user makes a mistake."""

    def __init__(self, mistake: type[LateStream] | type[LateEvent]) -> None:
        self._mistake = mistake
        super().__init__(late=ALWAYS_LATE)

    def event(self) -> LateEvent:
        return Unawaited(self) if self._mistake is Unawaited else super().event()

    def stream(self) -> LateStream:
        if not issubclass(self._mistake, LateStream):
            return super().stream()
        made: LateStream = self._mistake(self._delay_s)
        self._streams.append(made)
        return made
