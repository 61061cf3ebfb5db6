"""The hosts of a pod: their communication (`group`) and their heartbeats (`heartbeat`), on any device."""

from .group import (
    all_gather,
    all_reduce_max,
    barrier,
    broadcast,
    collective,
    connect,
    describe_hosts,
    find_index_and_count,
    is_connected,
    is_first,
    note_place,
)
