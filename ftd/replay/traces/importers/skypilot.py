"""SkyPilot's spot traces (``skypilot-org/spot-traces``, the data of "Can't Be Late", NSDI 2024).

A file is a JSON object for one availability zone: ``metadata.gap_seconds`` is the time between two samples, and
``data`` the number of instances that could be had at each sample. A sample holds until the next one, the last one for
``gap_seconds``. A sample that is ``null`` is missing; where missing samples are accepted, the previous number holds,
and those before the first number are left out.
"""

import msgspec

from ftd.replay.traces.importers.node_counts import CountSample, nodes_of_counts
from ftd.replay.traces.importers.trace_file import ImportOptions, TraceFile
from ftd.replay.traces.trace import Trace


class _Metadata(msgspec.Struct, frozen=True, kw_only=True):
    gap_seconds: float


class _SpotTrace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    metadata: _Metadata
    data: list[int | None]
    prices: list[float | None] | None = None


def is_skypilot(file: TraceFile) -> bool:
    """Return whether the file is a JSON object with samples at a fixed interval."""
    return file.text.lstrip().startswith("{") and '"gap_seconds"' in file.text


def read_skypilot(file: TraceFile, options: ImportOptions) -> Trace:
    """Return the trace of one zone.

    :raises TraceError: names the entry.
    """
    spot = file.decode_json(_SpotTrace)
    step_s = file.number(str(spot.metadata.gap_seconds), "time between two samples in seconds", "gap_seconds")
    if step_s == 0:
        raise file.error("the time between two samples is 0", place="gap_seconds", remedy="write seconds")
    samples: list[CountSample] = []
    missing = 0
    for index, count in enumerate(spot.data):
        place = f"data[{index}]"
        if count is None:
            if options.max_gap_s is None:
                raise file.error("the sample is missing", place=place, remedy="accept gaps with --max-gap")
            missing += 1
            continue
        if count < 0:
            raise file.error(f"{count} is not a number of nodes", place=place, remedy="write at least 0")
        samples.append(CountSample(place=place, at_s=index * step_s, count=count))
    if not samples:
        raise file.error("there is no sample", place="data", remedy="is it the right file?")
    end_s = len(spot.data) * step_s
    times = [(sample.place, sample.at_s) for sample in samples]
    records, notes = nodes_of_counts(file, samples)
    start_s = records[0].event.at_s
    gaps = file.gap_notes((*times, ("the end of data", end_s)), options.max_gap_s, start_s=start_s)
    first = round(samples[0].at_s / step_s)
    if first:
        notes += (f"The first {first} of {len(spot.data)} samples are missing and left out.",)
    if missing > first:
        notes += (
            f"{missing - first} of {len(spot.data)} samples are missing; the number before them holds.",
        )
    if spot.prices is not None:
        notes += ("The prices in the file are not used.",)
    return file.trace(records, description="skypilot", end_s=end_s, notes=notes + gaps)
