"""Lets mypy check that the functions of this package fulfil the contract of a backend."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .. import runtime
    from ..backend import Backend

    _: Backend = runtime
