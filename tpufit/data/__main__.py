"""`python -m tpufit.data warm module:dataset` fills a cache before training, on a machine without a TPU."""

import argparse
import importlib
from operator import attrgetter

from .cache import CachedDataset


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: the words after `python -m tpufit.data`."""
    parser = argparse.ArgumentParser(prog="python -m tpufit.data", description="Caches of samples.")
    parser.add_argument("command", choices=["warm"], help="make the missing files of a CachedDataset")
    parser.add_argument("dataset", metavar="module:dataset", help="the CachedDataset, e.g. my_project.data:train")
    parser.add_argument("--repair", action="store_true", help="also check all files, and remake damaged ones")
    chosen = parser.parse_args(arguments)
    module, _, name = chosen.dataset.partition(":")
    if not module or not name:
        parser.error(f"expected module:dataset, e.g. my_project.data:train, got {chosen.dataset!r}")
    dataset = attrgetter(name)(importlib.import_module(module))
    if not isinstance(dataset, CachedDataset):
        parser.error(f"{chosen.dataset} must be a tpufit.data.CachedDataset, got {type(dataset).__name__}")
    dataset.warm_up(repair=chosen.repair)


if __name__ == "__main__":
    main()
