"""The hosts of a pod: what they tell each other (`group`), and their signs of life (`heartbeat`), on any device."""

from .group import agree, at, broadcast, connect, everyone, is_first, known, together, whereabouts
