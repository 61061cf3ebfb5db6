"""The command line: `python -m tpufit doctor`, `preflight` (compiles a script's training) and `verify`."""

import argparse
import sys
import traceback
from pathlib import Path

from .checkup import doctor


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The words after `python -m tpufit` (default: this process's).

    Returns:
        The exit status. `doctor`: 1 if training would fail, else 0. `preflight`: 0, 1 if a training doesn't fit into
        the TPU, or 2 if it can't be compiled. `verify`: 1 if a check failed, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m tpufit", description="Keras's fit() for PyTorch on TPUs.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("doctor", help="check this machine; exit status 1 if a row is an error, else 0")
    check.add_argument("--no-train", action="store_true", help="only look; don't train on the device")
    check.add_argument("--timeout", type=float, default=300.0, help="seconds for each training (default: 300)")
    compiled = commands.add_parser(
        "preflight",
        help="compile each fit of a script for a TPU, on any machine; exit status 0, 1: does not fit, 2: fails",
    )
    compiled.add_argument("--tpu", default="v5e-8", help="a slice, or several with commas: v3-8,v6e-8 (default: v5e-8)")
    size = "rows per core instead of the script's; auto: the largest number that fits"
    compiled.add_argument("--batch-size", type=_rows, metavar="ROWS", help=size)
    policy = "auto: the cheapest policy of compile(remat=...) that fits"
    compiled.add_argument("--remat", choices=["auto"], help=policy)
    compiled.add_argument("--timeout", type=float, default=3600.0, help="seconds for each process (default: 3600)")
    compiled.add_argument("--save", type=Path, metavar="FOLDER", help="write report.json and the programs there")
    compiled.add_argument("script", type=Path)
    compiled.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's arguments")
    proof = commands.add_parser(
        "verify", help="check on this device what tpufit promises; exit status 1 if a check fails"
    )
    report = "the report's file (default: tpufit-report.json)"
    proof.add_argument("--out", type=Path, metavar="FILE", default=Path("tpufit-report.json"), help=report)
    proof.add_argument("--quick", action="store_true", help="only the most important checks")
    proof.add_argument("--timeout", type=float, default=600.0, help="seconds for all checks (default: 600)")
    virtual = "virtual cores without a TPU (default: 8)"
    proof.add_argument("--virtual-cores", type=int, metavar="COUNT", default=8, help=virtual)
    chosen = parser.parse_args(arguments)
    if chosen.command == "verify":
        from .verification import verify

        return verify(chosen.out, chosen.quick, timeout=chosen.timeout, virtual_cores=chosen.virtual_cores).status
    if chosen.command == "preflight":
        if not chosen.script.is_file():
            parser.error(f"there is no script {chosen.script}")
        return preflight(chosen)
    rows = doctor(train=not chosen.no_train, timeout=chosen.timeout)
    return int(any(row.status == "error" for row in rows))


def preflight(chosen: argparse.Namespace) -> int:
    """Compile each fit of a script, and print the reports.

    Args:
        chosen: The options of the command line.

    Returns:
        The exit status.
    """
    from .errors import TpufitError
    from .model import Model
    from .preflight.report import FAILED, find_exit_status
    from .preflight.run_script import run_script
    from .utils.terminal import standard_output

    console = standard_output()
    if not console.is_terminal:
        console.width = 120

    tpus = chosen.tpu.split(",")
    options = {"tpu": tpus if len(tpus) > 1 else tpus[0], "timeout": chosen.timeout}
    if chosen.batch_size is not None:
        options["batch_size"] = chosen.batch_size
    if chosen.remat is not None:
        options["remat"] = chosen.remat
    try:
        reports = run_script(chosen.script, chosen.arguments, Model, options, console.print)
    except TpufitError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except Exception:  # an error of the script, for which Python's exit status 1 would mean "doesn't fit"
        traceback.print_exc()
        return FAILED
    except KeyboardInterrupt:
        print("interrupted: the compiler was stopped, and nothing was changed", file=sys.stderr)
        return FAILED
    for number, report in enumerate(reports):
        if chosen.save is not None:
            report.save(chosen.save / str(number) if len(reports) > 1 else chosen.save)
    return find_exit_status(reports)


def _rows(word: str) -> int | str:
    if word != "auto" and not word.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number or auto, got {word!r}")
    return word if word == "auto" else int(word)


if __name__ == "__main__":
    sys.exit(main())
