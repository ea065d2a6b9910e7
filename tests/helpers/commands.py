"""Runs commands of ``ftd`` in the test's own process, which saves the second that a new process takes."""

import os
import sys

import pytest

from ftd.cli.main import main


def ftd_here(
    *arguments: str,
    patch: pytest.MonkeyPatch,
    said: pytest.CaptureFixture[str],
    columns: int = 200,
    **environment: str,
) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error. The logging of this process stays as it is.

    :param environment: variables of ftd that are set; all others are unset.
    """
    for name in [name for name in os.environ if name.startswith("FTD_")]:
        patch.delenv(name)
    for name, value in environment.items():
        patch.setenv(name, value)
    patch.setenv("COLUMNS", str(columns))
    patch.setattr("ftd.logs.configure_logs", lambda **_: None)
    patch.setattr(sys, "argv", ["ftd", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = said.readouterr()
    code = ended.value.code
    assert isinstance(code, int)
    return code, out, err
