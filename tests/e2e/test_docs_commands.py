"""Runs every command block of the README and of docs/: the shell is sound, options exist, and commands work
where they can be run.

The reader's directory has small versions of the files that pages name. Commands that need no running
cluster are run page by page, each page in its own directory. All others are run while a cluster of ``ftd
local`` trains in another terminal. ``test_docs_hosts`` runs the commands for several hosts. ``NOT_RUN``
lists what one machine cannot do, with the reason; these commands are still checked for syntax and options.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from ftd.cli.main import app
from runtime.process.zygote_request import SERVER_VARIABLE
from tests.helpers.docs_pages import ALL, PAGES, ROOT, blocks
from tests.helpers.docs_reader import ELSEWHERE, Reader
from tests.helpers.playground import write_job

NOT_RUN = {
    r"systemctl|systemd-|^sudo chown": "changes the system's services",
    r"\bkubectl\b|kubernetes|> ftd\.toml|^ftd submit /train": "needs Kubernetes; test_kubernetes runs "
    "the pods' own commands as processes",
    r"benchmarks\.gpu": "needs a GPU; test_gpu_benchmark runs its code on a processor",
    r"^sbatch": "needs Slurm; test_slurm runs the script with stand-ins for Slurm's commands",
}  # fmt: skip

INSTEAD = (
    # These take minutes, or need the reader's other host, shared disk or service.
    (r"(local examples/gpt.toml --nodes 4)( --steps 2000)?$", r"\1 --steps 100000"),
    # The loss of a model of 256 tokens begins near ln 256 = 5.5, and falls.
    (
        r"(local examples/llama.toml --nodes) 4( --steps 2000)?$",
        r"\1 2 --steps 6 --report llama.json && jq -e '[.steps[].loss] | "
        r"length == 6 and .[0] > 5 and .[0] < 6 and .[-1] < .[0]' llama.json",
    ),
    # Another page runs the same scenario, and has it write files.
    (
        r"(chaos run --local) examples/chaos/node-killed.toml$",
        r"\1 examples/chaos/*.toml --junit chaos.xml --json chaos.json --logs chaos-logs",
    ),
    # No node of the reader's cluster is bad; node-fails-repeatedly.toml has one.
    (r"^(ftd readmit \S+)$", r"(\1 2>&1 || true) | grep 'is not set aside'"),
    (r"stop llama", "stop gpt"),
    (r"checkpoints/llama my-llama --format huggingface", "checkpoints/gpt my-gpt --format torch"),
    (r"--minutes 5 --seed 1 --steps 2000", "--minutes 0.1 --seed 1 --steps 20"),
    (r"--seeds (?:20|50)", "--seeds 2"),
    (r"(local examples/nanogpt/train_ftd.toml --nodes) 4", r"\1 2 --steps 5"),
    (
        r"^python examples/nanogpt/train_plain.py$",
        r"sed -i 's/^max_iters = .*/max_iters = 5/' examples/nanogpt/train_plain.py && \g<0>",
    ),
    (r"^timeout -s KILL 10", "timeout -s KILL 4"),
    (r"^(python examples/scripts/(?:hf|lightning)_trainer\.py)$", r"\1 --steps 8 --pause-s 0"),
    (r"^(python examples/scripts/accelerate_loop\.py)$", r"\1 --epochs 2 --pause-s 0"),
    (r"( examples/scripts/ddp_loader\.py)$", r"\1 --epochs 2 --pause-s 0"),
    (r"(?<= )/checkpoints/", "checkpoints/"),
    (r"/etc/ftd/ftd\.toml|ftd-1234/ftd\.toml", "ftd.toml"),
    (r"sudo (mosquitto_passwd|touch|cp)\b", r"\1"),
    (r"/etc/mosquitto/", "mosquitto/"),
    (r"\nsudo chown mosquitto .*\nsudo systemctl restart mosquitto\n", "\n"),
    (r"^sudo (ftd install node)", r"\1 --dry-run"),
    (r"http://127\.0\.0\.1:9095", "$WEBHOOK"),
    (r"http://host-a:9650", "$DASHBOARD"),
    # These set up the environment that runs this test, or run all tests: make prints what it would do.
    (r"^make (.*)", rf"make -n -C {ROOT} \1"),
    # These run tests: check that the tests that they name exist.
    (r"^(FTD_REWRITE_GOLDEN=1 )?pytest (.*)", rf"cd {ROOT} && pytest --collect-only -q \2"),
    # These affect the terminal in which they are typed: check that they have their effect there.
    (r"^source \S+$", r"\g<0> && ftd --version"),
    (
        r"^export GLIBC_TUNABLES=glibc.cpu.(\S+)=(\S+)$",
        r"\g<0>; $(ldd /bin/bash | grep -o '/\\S*ld-linux\\S*') --list-tunables | grep '\1: \2 '",
    ),
)

ENDLESS = r"^ftd bridge|--follow|^ftd top|^mosquitto_sub (?!-C)|^python examples/subscriber"
"""Commands that never end and run in parallel with all others; each must have an effect by the end."""
ALONE = r"^ftd (plan|profile|replay|sim|local|chaos (run --local|soak))\b|examples/scripts/"
"""Commands that need no running cluster."""
TRAINS = "ftd local examples/gpt.toml"
"""Command in the other terminal."""
NEEDED = {"profiles.md": "training.md"}
"""Page whose commands write files → page whose commands read them."""
LAST = (r"dead-letters", r"^ftd stop")
"""Commands that come last."""


def reason_not_to_run(command: str) -> str | None:
    made = as_run(command)
    if re.search(ELSEWHERE, command):
        return "several hosts"
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, made)), None)


def as_run(command: str) -> str:
    for pattern, instead in INSTEAD:
        command = re.sub(pattern, instead, command)
    return command


def test_the_blocks_are_sound_shell_and_all_are_found() -> None:
    pages = {name for name, _ in ALL}
    assert len(ALL) > 60 and pages >= {"README.md", "first-run.md", "recipes.md", "deploying.md"}
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
    """Yield the words that follow each ``ftd`` of a command line."""
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
    """Check that click accepts these words.

    :raises AssertionError: click rejects them.
    """
    command: Any = get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, where
        command, words = command.commands[words[0]], words[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    given = [word.partition("=")[0] for word in words if word.startswith("-") and not re.match(r"-\d", word)]
    assert [option for option in given if option not in {*known, "--help"}] == [], where


def test_every_entry_of_the_tables_is_of_use() -> None:
    written = [command for _, command in ALL]
    for pattern in (*NOT_RUN, ELSEWHERE, *(pattern for pattern, _ in INSTEAD), ENDLESS, ALONE, *LAST):
        assert any(re.search(pattern, command) for command in written), f"{pattern}: no command matches"
    run = {as_run(command) for command in written if reason_not_to_run(command) is None}
    assert len(run) > 50, run


class Webhook:
    """A server that rejects the first alert, which makes it a dead letter, and accepts all others."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                alert = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                webhook.alerts.append(alert)
                self.send_response(400 if len(webhook.alerts) == 1 else 200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,)).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


SMALL_SCENARIO = """
[cluster]
job = "../mlp.toml"
nodes = 2
steps = 100000
[[fault]]
at_step = 2
do = "kill"
node = "node-1"
[expect]
phase = "RUNNING"
"""


def furnish(place: Path) -> None:
    """Write small versions of the files that pages name, and the files of a broker's host."""
    shutil.copytree(ROOT / "examples", place / "examples", ignore=shutil.ignore_patterns("chaos", "gpt.*"))
    job = write_job(place, delay_s=0.03).read_text().replace('name = "tiny"', 'name = "gpt"')
    (place / "examples" / "gpt.toml").write_text(
        f'{job}[snapshot]\nevery_steps = 10\n[checkpoint]\nurl = "{place}/checkpoints/gpt"\n'
        "every_steps = 20\nkeep = 1000\n"
    )
    # The text that the llama is trained on, and traces.
    for folder in ("ftd", "runtime", "statemachine", "planner", "benchmarks"):
        (place / folder).symlink_to(ROOT / folder)
    chaos = place / "examples" / "chaos"
    chaos.mkdir()
    (chaos / "node-killed.toml").write_text(SMALL_SCENARIO)
    (place / "my-scenario.toml").write_text(
        '[[fault]]\nafter_s = 0\ndo = "slow"\nnode = "node-0"\nfactor = 1.1\nfor_s = 0.2\n'
    )
    [layers] = re.findall(
        r"^```json\n(.*?)^```", (ROOT / "docs" / "how-to" / "planning.md").read_text(), re.M | re.S
    )
    (place / "layers.json").write_text(layers)
    (place / "dashboard-token").write_text("none is asked for on loopback\n")
    (place / "mosquitto").mkdir()
    (place / "mosquitto" / "ftd.passwd").touch(mode=0o600)
    (place / ".config").mkdir()
    (place / ".venv").symlink_to(sys.prefix)


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    webhook = Webhook()
    yield webhook
    webhook.close()


@pytest.fixture
def reader(webhook: Webhook) -> Iterator[Reader]:
    with tempfile.TemporaryDirectory(prefix="r-") as name:  # Short, because unix sockets are in it.
        place = Path(name)
        furnish(place)
        made = Reader(place, f"http://127.0.0.1:{webhook.server.server_port}")
        try:
            yield made
        finally:
            made.end()


@pytest.fixture(scope="module", autouse=True)
def programs() -> None:
    for program in ("jq", "curl", "mosquitto"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


def todo() -> dict[str, str]:
    """Return each command that is run, once, with a page that has it."""
    return {as_run(command): page for page, command in ALL if reason_not_to_run(command) is None}


def without_cluster() -> dict[str, list[str]]:
    """Return commands that need no running cluster, by page. The commands of a page in ``NEEDED`` are
    added to the page that reads their files.
    """
    found: dict[str, list[str]] = {}
    for page, command in ALL:
        made = as_run(command)
        if reason_not_to_run(command) is None and re.search(ALONE, made) and TRAINS not in made:
            commands = found.setdefault(NEEDED.get(page, page), [])
            if not any(made in others for others in found.values()):
                commands.append(made)
    return {page: commands for page, commands in found.items() if commands}


@pytest.mark.parametrize("page", without_cluster())
def test_commands_without_a_cluster_do_what_the_page_says(reader: Reader, page: str) -> None:
    if page != "README.md":
        reader.environment |= {SERVER_VARIABLE: os.environ[SERVER_VARIABLE]}  # It has imported torch already.
    problems = reader.run([(page, command) for command in without_cluster()[page]])
    assert problems == [], "\n".join(problems)


@pytest.mark.timeout(1800)  # It runs more than 50 commands; other tests need a few.
def test_commands_do_what_the_pages_say(reader: Reader, webhook: Webhook) -> None:
    commands = todo()
    training = next(command for command in commands if TRAINS in command)
    commands.pop(training)
    endless = [command for command in commands if re.search(ENDLESS, command)]
    rest = {c: p for c, p in commands.items() if c not in endless and not re.search(ALONE, c)}
    last = [(p, c) for pattern in LAST for c, p in rest.items() if re.search(pattern, c)]
    first = [(p, c) for c, p in rest.items() if (p, c) not in last]
    reader.train(training)
    for command in endless:
        reader.begin(command)
    problems = reader.run(first)
    [bridge] = [command for command in endless if command.startswith("ftd bridge")]
    reader.until(lambda: len(webhook.alerts) > 1, bridge)
    problems += reader.run(last)
    problems += [f"{c}: said nothing" for c in endless if c != bridge and not reader.said(c)]
    assert problems == [], "\n".join(problems)
