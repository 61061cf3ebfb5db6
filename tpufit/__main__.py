"""`python -m tpufit doctor` checks this machine. Its exit status is 1 if a row is an error, else 0, warnings or not."""

import argparse
import sys

from .diagnostics.checkup import doctor


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The words after `python -m tpufit` (default: those of this process).

    Returns:
        The exit status: 1 if something would make training fail, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m tpufit", description="Keras's fit() for PyTorch on TPUs.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("doctor", help="check this machine; exit status 1 if a row is an error, else 0")
    check.add_argument("--no-train", action="store_true", help="look only; train nothing on the device")
    check.add_argument("--timeout", type=float, default=300.0, help="seconds for each training (default: 300)")
    chosen = parser.parse_args(arguments)
    rows = doctor(train=not chosen.no_train, timeout=chosen.timeout)
    return int(any(row.status == "error" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
