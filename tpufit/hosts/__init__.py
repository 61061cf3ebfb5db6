"""The hosts of a pod: what they tell each other (`group`), and their signs of life (`heartbeat`), on any device."""

from .group import (
    all_gather,
    all_reduce_max,
    barrier,
    broadcast,
    collective,
    connect,
    is_first,
    known,
    note_place,
    whereabouts,
)
