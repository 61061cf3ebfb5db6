"""Here mypy compares the functions of this package with those that the rest of tpufit asks of a backend."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .. import runtime
    from ..backend import Backend

    _: Backend = runtime
