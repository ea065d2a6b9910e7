"""The installed ``ftd`` command. It imports nothing before Ctrl-C can end it without a traceback."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C while its modules are imported ends it with exit code 130, as it does later."""
    try:
        from ftd.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
