"""Persistent checkpoints, the last tier of state when no host's memory holds it (docs/how-to/checkpoints.md).

The checkpoint of a step is a directory with one file for each layer, in the bytes that
``runtime.layers.state.LayerStates.pack`` makes, and a manifest, which is written last. It does not depend
on pipelines or nodes: any holder of a layer writes that layer, from any number of hosts in parallel; one of
them commits; and a reader reads the layers that it needs.

An incomplete or corrupt directory is never taken for a checkpoint: ``CheckpointStore.steps`` skips it and
describes it in ``problems`` or ``unfinished``.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from storage.description import ModelDescription, decode_description
from storage.errors import (
    CheckpointMissingError,
    CorruptDataError,
    ForeignCheckpointError,
    LocationError,
    StorageError,
)
from storage.layerfile import (
    Bytes,
    is_consistent,
    read_header,
    read_layer_file,
    verify_layer_file,
    write_layer_file,
)
from storage.layerstate import LayerHeader, fingerprint_of
from storage.locations import CheckpointLocation, open_location
from storage.manifest import MAX_BYTES, decode_record, encode_record
from storage.rate_limit import RateLimiter
from storage.values import LayerFile, job_mark

FORMAT = 2
"""Format of the manifest and of the files, described in docs/how-to/checkpoints.md."""
READABLE = (1, FORMAT)
"""Formats that this version reads. Format 1 has no description of the model."""
MANIFEST = "manifest.json"

_STEP = re.compile(r"step-(\d{12})", re.ASCII)
_DRAFT = re.compile(r"\.step-(\d{12})\.\w+\.partial", re.ASCII)
_DATA = re.compile(r"layer-\d{4,}(-\w+)?\.bin", re.ASCII)
_DESCRIPTION = re.compile(r"description(-\w+)?\.bin", re.ASCII)
_MOST_DESCRIPTION_BYTES = 64 * 1024 * 1024
_ATTEMPT = re.compile(r"\w{1,64}", re.ASCII)
_MARK = re.compile(r"(__[0-9a-f]{8})\.(partial|bin)", re.ASCII)
"""End of the name of a draft, and of a file in one, whose attempt has the mark of a job."""
_UNFINISHED = "it is being written, or its writer was stopped"


def _name_of(step: int) -> str:
    return f"step-{step:012d}"


class DescriptionFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file with the description of the model (``storage.description``), which contains its own digest."""

    name: str
    size_bytes: int


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest of a checkpoint; ``layers[i]`` is the file of layer i."""

    format: int = FORMAT
    job: str
    """Name of the job, which stays the same when the job is submitted again."""
    job_id: str
    step: int
    vote: dict[str, Any] | None
    """Vote of the step, with loss and gradient norm; ``None`` before the first step."""
    fingerprint: str
    """Fingerprint of the model: ``storage.layerstate.fingerprint_of``."""
    written_at: float
    """Seconds since the epoch."""
    ftd_version: str
    layers: tuple[LayerFile, ...]
    description: DescriptionFile | None = None
    """File of the model's description; ``None`` if no writer had one."""

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDraft:
    """A checkpoint that is being written. Every writer of it begins the same step and attempt."""

    step: int
    attempt: str
    directory: str


@dataclass(slots=True)
class CheckpointStore:
    """The checkpoints of one job, in one directory or under one URL. It may be used from several threads."""

    location: CheckpointLocation
    job: str | None = None
    """Name of the job, whose checkpoints alone are used; ``None`` for all that are there."""
    problems: list[str] = field(default_factory=list)
    """Descriptions of the broken checkpoints that the last ``steps`` skipped."""
    unfinished: list[str] = field(default_factory=list)
    """Descriptions of the checkpoints that are being written, or whose writer was stopped."""

    @classmethod
    def at(cls, url: str, *, job: str | None = None, create: bool = False) -> "CheckpointStore":
        """Return the store at a location.

        :param url: a path, ``file://…``, or any URL of fsspec.
        :param create: make the directory if it is missing; it is not made otherwise.
        :raises LocationError: the URL cannot be used, or the directory not made.
        """
        store = cls(open_location(url), job)
        if create:
            store.location.create()
        return store

    # --- writing ---------------------------------------------------------------------------------

    def begin(self, step: int, attempt: str = "1") -> CheckpointDraft:
        """Begin to write the checkpoint of a step.

        :param attempt: name that distinguishes the attempts at one step, such as the plan's generation, so
            that a late writer of an earlier attempt cannot overwrite a later one. It consists of letters,
            digits and underscores. If it ends with ``storage.values.job_mark``, other jobs do not remove it.
        :raises LocationError: the location cannot be written to.
        """
        if not 0 <= step < 10**12 or not _ATTEMPT.fullmatch(attempt):
            raise ValueError(f"invalid step or attempt: {step}, {attempt!r}")
        draft = CheckpointDraft(
            step=step, attempt=attempt, directory=self.location.draft(_name_of(step), attempt)
        )
        self.location.begin(draft.directory)
        return draft

    def write_layer(
        self,
        draft: CheckpointDraft,
        layer: int,
        header: bytes,
        payload: Iterable[Any],
        flow: RateLimiter | None = None,
    ) -> LayerFile:
        """Write a layer; it is on the disk when this returns.

        :param payload: its bytes in any number of contiguous buffers of any size. Each is read once, in
            order, and not copied; the bytes must not change until this returns.
        :param flow: limits the rate, and can cancel.
        :raises LocationError: it cannot be written, or the disk is full; no file is left.
        :raises TransferCancelledError: the writing was cancelled; no file is left.
        :raises CorruptDataError: header and payload do not belong together.
        """
        name = self.location.data_name(f"layer-{layer:04d}", draft.attempt)
        return write_layer_file(self.location, draft.directory, name, layer, header, payload, flow)

    def write_description(self, draft: CheckpointDraft, data: bytes) -> None:
        """Write what ``storage.description.encode_description`` returned, before the layers of the same
        writer.

        :raises LocationError: it cannot be written; no file is left.
        :raises CorruptDataError: ``data`` is not a description.
        """
        decode_description(data, "the description of the model")
        self.location.write(draft.directory, self._description_name(draft), [memoryview(data)])

    def _description_name(self, draft: CheckpointDraft) -> str:
        return self.location.data_name("description", draft.attempt)

    def commit(
        self,
        draft: CheckpointDraft,
        files: Sequence[LayerFile],
        *,
        job: str,
        job_id: str,
        vote: dict[str, Any] | None,
        written_at: float,
        ftd_version: str,
    ) -> CheckpointManifest:
        """Commit the checkpoint after all writers are done. An older one of this step is replaced.

        :param files: what all writers returned: every layer of the model once, in any order.
        :raises CorruptDataError: a layer is missing, or its file is not there as it was written.
        :raises ForeignCheckpointError: another job's checkpoint of this step is there.
        :raises LocationError: the manifest cannot be written; what was there stays.
        """
        ordered = tuple(sorted(files, key=lambda file: file.layer))
        if not ordered or [file.layer for file in ordered] != list(range(len(ordered))):
            layers = [file.layer for file in ordered]
            raise CorruptDataError(
                f"step {draft.step}: layers {layers} were written; each layer is needed exactly once"
            )
        manifest = CheckpointManifest(
            job=job,
            job_id=job_id,
            step=draft.step,
            vote=vote,
            fingerprint="",
            written_at=written_at,
            ftd_version=ftd_version,
            layers=ordered,
            description=self._description_of(draft),
        )
        self._check_files(manifest, draft.directory)
        drafted = Checkpoint(self.location, draft.directory, manifest)
        manifest = msgspec.structs.replace(manifest, fingerprint=fingerprint_of(drafted.headers()))
        final = _name_of(draft.step)
        if self._has_manifest(final):
            self._check_replaceable(final, job)
        self.location.write(draft.directory, MANIFEST, [memoryview(encode_record(manifest))])
        self.location.publish(draft.directory, final)
        return manifest

    def _description_of(self, draft: CheckpointDraft) -> DescriptionFile | None:
        """Return the description that a writer wrote, if any did."""
        name = self._description_name(draft)
        size_bytes = self.location.sizes(draft.directory).get(name)
        return None if size_bytes is None else DescriptionFile(name=name, size_bytes=size_bytes)

    def abandon(self, draft: CheckpointDraft) -> None:
        """Remove what was written of a draft.

        :raises LocationError: it cannot be removed.
        """
        self.location.abandon(draft.directory, draft.attempt)

    def prune(self, keep: int, *, newest: int | None = None, exempt: Collection[int] = ()) -> tuple[int, ...]:
        """Remove all but the newest ``keep`` complete checkpoints of this job, and return the removed steps.

        Corrupt or unfinished checkpoints are removed if they are older than the oldest that stays. An
        unfinished one is also removed if a complete one of its step or a later one is there. So the newest
        draft is safe. What another job is writing stays.

        :param newest: remove checkpoints of later steps as well, which belong to a history that was undone;
            ``None`` if nothing was undone.
        :param exempt: steps of checkpoints that stay for now, because they are being read.
        :raises LocationError: something cannot be removed.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
        existing = [manifest.step for manifest in self.manifests()]
        complete = [step for step in existing if newest is None or step <= newest]
        if not complete:
            return ()
        undone = set(existing) - set(complete)
        oldest, newest = complete[:keep][-1], complete[0]
        for name in self.location.names():
            if found := _STEP.fullmatch(name):
                step = int(found[1])
                if step in exempt:
                    continue
                unfinished = step not in complete and step <= newest and not self._has_manifest(name)
                if step in undone or ((unfinished or step < oldest) and not self._is_foreign(name)):
                    self.location.remove(name)
            elif (
                (found := _DRAFT.fullmatch(name))
                and int(found[1]) <= newest
                and not self._has_other_mark(name)
            ):
                self.location.remove(name)
        return tuple(sorted({*complete[keep:], *undone}.difference(exempt)))

    # --- reading ---------------------------------------------------------------------------------

    def steps(self) -> tuple[int, ...]:
        """Return the steps of complete checkpoints, the newest first, and set ``problems`` and ``unfinished``.

        A checkpoint is complete if its manifest is intact and every file that it names is there in its full
        size. Their bytes are verified when they are read, or by ``Checkpoint.verify``.

        :raises LocationError: the location cannot be read.
        """
        return tuple(manifest.step for manifest in self.manifests())

    def manifests(self) -> tuple[CheckpointManifest, ...]:
        """Return the manifests of the checkpoints that ``steps`` returns."""
        problems, unfinished, found = [], [], []
        for name in self.location.names():
            if _DRAFT.fullmatch(name):
                unfinished.append(f"{name} is skipped: {_UNFINISHED}")
            elif _STEP.fullmatch(name):
                try:
                    found.append(self._manifest(name))
                except StorageError as error:
                    if name not in self.location.names():
                        continue  # It was removed meanwhile.
                    if isinstance(error, LocationError):
                        raise
                    if self._is_draft(name):
                        unfinished.append(f"{name} is skipped: {_UNFINISHED}")
                    else:
                        problems.append(f"{name} is skipped: {error}")
        self.problems, self.unfinished = problems, unfinished
        return tuple(sorted(found, key=lambda manifest: manifest.step, reverse=True))

    def open(self, step: int | None = None) -> "Checkpoint":
        """Return the checkpoint of a step, or the newest complete one.

        :raises CheckpointMissingError: the location has no complete checkpoint, or none of this step.
        :raises CorruptDataError: the checkpoint of this step is not complete.
        :raises ForeignCheckpointError: the checkpoint is another job's, or of another format.
        """
        if step is None:
            manifests = self.manifests()
            if not manifests:
                reasons = "".join(f"; {problem}" for problem in (*self.problems, *self.unfinished))
                raise CheckpointMissingError(f"{self.location.url} has no complete checkpoint{reasons}")
            return Checkpoint(self.location, _name_of(manifests[0].step), manifests[0])
        if _name_of(step) not in self.location.names():
            existing = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointMissingError(
                f"{self.location.url} has no checkpoint of step {step}; complete ones: {existing}"
            )
        return Checkpoint(self.location, _name_of(step), self._manifest(_name_of(step)))

    # --- checks ----------------------------------------------------------------------------------

    def _manifest(self, directory: str) -> CheckpointManifest:
        manifest = self._sound_manifest(directory)
        if self.job is not None and manifest.job != self.job:
            raise ForeignCheckpointError(f"it is of job {manifest.job!r}, not of {self.job!r}")
        self._check_files(manifest, directory)
        return manifest

    def _sound_manifest(self, directory: str) -> CheckpointManifest:
        where = f"{self.location.url}/{directory}/{MANIFEST}"
        size_bytes = self.location.sizes(directory).get(MANIFEST)
        if size_bytes is None:
            raise CheckpointMissingError(f"it has no manifest: {_UNFINISHED}")
        if size_bytes > MAX_BYTES:
            raise CorruptDataError(f"{where} is larger than {MAX_BYTES} bytes")
        with self.location.open(directory, MANIFEST) as file:
            data = file.read()
        # The format first: a manifest of another version is not corrupt.
        found_format = decode_record(data, dict[str, Any], where).get("format")
        if found_format not in READABLE:
            raise ForeignCheckpointError(f"it is of format {found_format}; this version reads {FORMAT}")
        manifest = decode_record(data, CheckpointManifest, where)
        if _name_of(manifest.step) != directory:
            raise CorruptDataError(f"its manifest is of step {manifest.step}")
        return manifest

    def _check_files(self, manifest: CheckpointManifest, directory: str) -> None:
        sizes = self.location.sizes(directory)
        for number, file in enumerate(manifest.layers):
            if file.layer != number or not _DATA.fullmatch(file.name) or not is_consistent(file):
                raise CorruptDataError(f"its manifest is inconsistent for layer {number}: {file}")
            size_bytes = sizes.get(file.name)
            if size_bytes is None:
                raise CorruptDataError(f"{file.name} is missing")
            if size_bytes != file.size_bytes:
                raise CorruptDataError(f"{file.name} has {size_bytes} bytes; {file.size_bytes} were written")
        described = manifest.description
        if described is not None:
            if not _DESCRIPTION.fullmatch(described.name) or described.size_bytes > _MOST_DESCRIPTION_BYTES:
                raise CorruptDataError(f"its manifest is inconsistent for the description: {described}")
            if sizes.get(described.name) != described.size_bytes:
                raise CorruptDataError(f"{described.name} is missing or incomplete")

    def _is_draft(self, directory: str) -> bool:
        """Return whether the directory is a draft that waits for its manifest. That is possible only where
        drafts have their final name; elsewhere the manifest was lost.
        """
        return self.location.draft(directory, "1") == directory and not self._has_manifest(directory)

    def _has_manifest(self, directory: str) -> bool:
        return MANIFEST in self.location.sizes(directory)

    def _check_replaceable(self, directory: str, job: str) -> None:
        try:
            existing = self._sound_manifest(directory)
        except (CorruptDataError, CheckpointMissingError):
            return
        if existing.job != job:
            raise ForeignCheckpointError(
                f"{self.location.url}/{directory} is of job {existing.job!r}; give {job!r} a directory of its own"
            )

    def _is_foreign(self, directory: str) -> bool:
        try:
            return self.job is not None and self._sound_manifest(directory).job != self.job
        except ForeignCheckpointError:
            return True
        except (CorruptDataError, CheckpointMissingError):
            return any(self._has_other_mark(name) for name in self.location.sizes(directory))

    def _has_other_mark(self, name: str) -> bool:
        """Return whether a draft or a file has the mark of another job (``storage.values.job_mark``)."""
        found = _MARK.search(name)
        return self.job is not None and found is not None and found[1] != job_mark(self.job)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint to read from. Everything that it returns was compared with its digest."""

    location: CheckpointLocation
    directory: str
    manifest: CheckpointManifest

    def header(self, layer: int) -> LayerHeader:
        """Return what a layer holds, without reading its payload.

        :raises CorruptDataError: it differs from what was written.
        :raises LocationError: it cannot be read.
        """
        return read_header(self.location, self.directory, self.manifest.layers[layer])

    def headers(self) -> tuple[LayerHeader, ...]:
        """Return the headers of all layers."""
        return tuple(self.header(layer) for layer in range(len(self.manifest.layers)))

    def description(self) -> ModelDescription:
        """Return the description of the model, an empty one if none was written.

        :raises CorruptDataError: it differs from what was written.
        :raises LocationError: it cannot be read.
        """
        file = self.manifest.description
        if file is None:
            return ModelDescription()
        with self.location.open(self.directory, file.name) as opened:
            return decode_description(opened.read(), file.name)

    def read_layer(self, layer: int) -> tuple[bytes, LayerHeader, Bytes]:
        """Return the header as bytes, the decoded header, and the payload. ``LayerStates.unpack`` takes the
        first and the last. The payload belongs to the caller.

        :raises CorruptDataError: a byte differs from what was written.
        :raises LocationError: it cannot be read.
        """
        return read_layer_file(self.location, self.directory, self.manifest.layers[layer])

    def verify(self) -> tuple[str, ...]:
        """Read everything and return descriptions of what differs from what was written. It needs the memory
        of one chunk.

        :raises LocationError: something cannot be read.
        """
        problems, headers = [], []
        for file in self.manifest.layers:
            try:
                headers.append(verify_layer_file(self.location, self.directory, file))
            except CorruptDataError as error:
                problems.append(str(error))
        try:
            self.description()
        except CorruptDataError as error:
            problems.append(str(error))
        if not problems and fingerprint_of(headers) != self.manifest.fingerprint:
            problems.append("the fingerprint of the model differs from that of its layers")
        return tuple(problems)
