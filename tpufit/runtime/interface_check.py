"""Lets mypy check that the functions of this package implement the `Backend` protocol."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .. import runtime
    from ..backend import Backend

    _: Backend = runtime
