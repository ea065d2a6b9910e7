"""The reference of recovery policies names every policy and every key of its parameters."""

import re
import tomllib
from pathlib import Path

import pytest

from ftd.replay.policies.registry import POLICIES

ROOT = Path(__file__).parents[4]
PARAMETERS = tomllib.loads((ROOT / "ftd/replay/parameters.toml").read_text(encoding="utf-8"))
SECTIONS = dict(
    re.findall(
        r"^## ([\w-]+)\n(.*?)(?=^## |\Z)",
        (ROOT / "docs/reference/replay-policies.md").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
)


def test_every_table_of_parameters_belongs_to_a_policy() -> None:
    assert set(PARAMETERS) <= set(POLICIES)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_has_a_section_with_all_its_keys(policy: str) -> None:
    named = set(re.findall(r"`([a-z_]+)`", SECTIONS[policy]))
    assert set(PARAMETERS.get(policy, {})) <= named
