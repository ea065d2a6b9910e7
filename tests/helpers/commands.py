"""Commands of ``ftd`` run in the test's own process: as they end, without the second that a process takes."""

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
    """Exit code, standard output and standard error. This process's logs stay as they are.

    :param environment: variables of ftd that are set; all others are not.
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
