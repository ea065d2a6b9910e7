"""Every command block of the README and of docs/: sound shell, options that exist, and run where possible.

Blocks are run page by page and in order, against a cluster that trains. What one machine cannot do is
in ``NOT_RUN``, with its reason; those are checked like all others for syntax and options.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from ftd.cli.main import app
from tests.e2e.playground import Playground, tiny_job

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")])
PROGRAMS = (
    "ftd", "make", "curl", "sudo", "mosquitto_sub", "jq", "python", "source", "for", "kubectl", "sbatch",
    "torchrun", "export", "head", "squeue", "scancel", "git", "pip", "export",
)  # fmt: skip
PATIENCE_S = 60.0
ENDLESS_S = 2.0

NOT_RUN = {
    r"^make ": "sets up the very environment that runs this test, or runs all tests",
    r"^source ": "of the reader's terminal; here the same programs are on PATH",
    r"^(sudo|for user in)\b": "changes the system's services and accounts",
    r"^kubectl |kubernetes": "needs a cluster of Kubernetes; its files are held against the schema elsewhere",
    r"^(sbatch|squeue|scancel|salloc)": "needs Slurm",
    r"^torchrun|^export ": "two hosts with a script of the reader's",
    r"host-a:|10\.0\.0\.|\$FIRST|broker ": "another host",
    r"^ftd plan examples/gpt.toml": "measures layers; test_cli_plan does with a smaller model",
    r"ftd-1234|^printf |umask 077": "another host, as told in the lines before",
    r"/checkpoints/": "a shared disk of the reader's",
    r"^ftd (coordinator|node|submit)\b|/etc/ftd|--snapshots-only": "of several hosts",
    r"^ftd (local|profile)\b": "minutes of training; test_e2e_local and test_cli run these commands",
    r"^ftd (bridge|trace|reliability)\b": "has tests of its own, with the ends that it needs",
    r"dead-letters|subscriber\.py": "test_recipes runs it",
    r"^ftd (chaos (run|soak)|sim|checkpoint|snapshot)\b": "has tests of its own with the files that it names",
    r"layers\.json|profile\.json|gpt\.json|mlp\.json|train\.toml": "a file that the reader makes",
    r"^ftd report\b": "of a job that is over; its own tests make the same page",
}  # fmt: skip


def is_commands(language: str, text: str) -> bool:
    if language in ("sh", "bash", "console"):
        return True
    first = next((line for line in text.splitlines() if line.strip()), "")
    word = re.sub(r"^([A-Z]?\$ )", "", first).split(" ")[0]
    return not language and word in PROGRAMS


def blocks(page: Path) -> list[str]:
    """Where prompts tell commands from what they print, the commands alone."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    made = []
    for language, text in found:
        if is_commands(language, text):
            prompted = re.findall(r"^[A-Z]?\$ (.*\n)", text, re.MULTILINE)
            made.append("".join(prompted) or text)
    return made


def commands(block: str) -> list[str]:
    """Each on its own; a loop, or what goes on behind a backslash, stays whole."""
    if re.match(r"(for|while|if)\b", block):
        return [block]
    joined = block.replace("\\\n", " ")
    if re.search(r"^\s+\S", joined, re.M) or "| while" in joined:
        return [joined]
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


ALL = [(page.name, command) for page in PAGES for block in blocks(page) for command in commands(block)]


def reason_not_to_run(command: str) -> str | None:
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command)), None)


def test_the_blocks_are_sound_shell_and_all_are_found() -> None:
    assert len(ALL) > 60 and {name for name, _ in ALL} >= {
        "README.md",
        "first-run.md",
        "recipes.md",
        "deploying.md",
    }
    for page in PAGES:
        text = "\n".join(f"( {block}\n)" for block in blocks(page))
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
        assert done.returncode == 0, f"{page.name}: {done.stderr}"


def test_every_ftd_command_has_the_options_that_it_is_given() -> None:
    seen = set()
    for page, command in ALL:
        for words in ftd_commands(command):
            options_of(words, f"{page}: {command}")
            seen.add(words[0])
    assert len(seen) > 15


def ftd_commands(command: str) -> Iterator[list[str]]:
    """The words behind each ``ftd`` of a command line."""
    for line in command.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        words: list[str] | None = None
        before = ";"
        for word in [*lexer, ";"]:
            if re.fullmatch(r"[();<>|&]+", word):
                if words:
                    yield words
                words = None
            elif words is not None:
                words.append(word)
            elif word == "ftd" and (before in ("sudo", "do", "exec") or re.fullmatch(r"[();<>|&]+", before)):
                words = []
            before = word


def options_of(words: list[str], where: str) -> None:
    """:raises AssertionError: click would refuse these words."""
    command: Any = get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, where
        command, words = command.commands[words[0]], words[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    given = [word.partition("=")[0] for word in words if word.startswith("-") and not re.match(r"-\d", word)]
    assert [option for option in given if option not in {*known, "--help"}] == [], where


def test_what_is_not_run_has_a_reason_that_is_used() -> None:
    for pattern in NOT_RUN:
        assert any(re.search(pattern, command) for _, command in ALL), f"{pattern}: of no use"
    run = [command for _, command in ALL if reason_not_to_run(command) is None]
    assert len(run) >= 18, run


@pytest.fixture
def reader(ground: Playground, tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A directory and an environment as a reader has them, beside a cluster that trains."""
    run = ground.submit(tiny_job(tmp_path))
    assert run.losses
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, text in (("secret", "s"), ("password", "p")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "ftd.toml").write_text('cluster = "local"\nsecret_file = "secret"\n')
    home = tmp_path / ".config"
    home.mkdir()
    port = ground.cluster.broker.port
    (home / "mosquitto_sub").write_text(f"-h 127.0.0.1\n-p {port}\n")
    yield (
        tmp_path,
        {
            **os.environ,
            "HOME": str(tmp_path),
            "XDG_CONFIG_HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "FTD_BROKER": f"mqtt://127.0.0.1:{port}",
            "FTD_CLUSTER": ground.cluster.options.cluster,
            "OMP_NUM_THREADS": "1",
        },
    )
    ground.tidy()


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_commands_do_what_the_pages_say(reader: tuple[Path, dict[str, str]], ground: Playground) -> None:
    directory, environment = reader
    done_already: set[str] = set()
    problems = []
    for page, command in ALL:
        if reason_not_to_run(command) is not None or command in done_already:
            continue
        done_already.add(command)
        here = command.replace("ftd/v1/ftd/", f"ftd/v1/{ground.cluster.options.cluster}/").replace(
            "stop gpt", "stop tiny"
        )
        code, said = shell(here, directory, environment)
        if code != 0:
            problems.append(f"{page}: {command}\n  exit code {code}: {said[-400:]}")
    assert problems == [], "\n".join(problems)


def shell(command: str, directory: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and output; 0 for what would go on for ever, and did so for a while."""
    endless = re.search(r"--follow|^ftd top|mosquitto_sub (?!-C)", command) is not None
    process = subprocess.Popen(
        ["bash", "-e", "-o", "pipefail", "-c", command],
        cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=ENDLESS_S if endless else PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        return (0 if endless else -1), said
    return process.returncode, said
