"""Profile files of profiles that were not measured."""

import msgspec

from ftd.config.profile_document import SCHEMA, ProfileDocument
from planner.values import ModelProfile


def profile_document(profile: ModelProfile) -> ProfileDocument:
    """Return a profile as the content of a file, without measurements and provenance."""
    return msgspec.convert({"schema": SCHEMA} | msgspec.to_builtins(profile), ProfileDocument)
