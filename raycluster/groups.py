"""Which placement group a training's ranks hold, written down so that it can be given back if its driver is killed.

Ray frees it when the driver's whole job ends, but members and trials are drivers inside of one job; Ray Train's own
cleaner asks the dashboard, which a local Ray does without.
"""

from __future__ import annotations

from pathlib import Path

from ray import PlacementGroupID
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group_table,
    remove_placement_group,
)

from xmc.files import atomic_write_text

_FILE = "group.txt"


def note(directory: Path) -> None:
    """In a rank: write down the group that it runs in."""
    if (group := get_current_placement_group()) is not None:
        atomic_write_text(directory / _FILE, group.id.hex())


def is_held(directory: Path) -> bool:
    """Whether a group is noted in `directory` that nobody has given back yet."""
    return (directory / _FILE).exists()


def release(directory: Path) -> None:
    """Give back the group that was noted in `directory`, if there is one that still holds anything."""
    file = directory / _FILE
    if not file.exists():
        return
    left = file.read_text()
    if placement_group_table().get(left, {"state": "REMOVED"})["state"] != "REMOVED":
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(left))))
    file.unlink(missing_ok=True)
