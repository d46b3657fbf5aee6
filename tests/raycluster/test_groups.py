"""A group whose driver was killed is given back."""

from __future__ import annotations

import time
from pathlib import Path

from ray.util.placement_group import placement_group, placement_group_table

from raycluster import groups


def test_what_a_killed_driver_left_reserved_is_given_back(ray_session: None, tmp_path: Path):
    left = placement_group([{"CPU": 0.5}])
    assert left.wait(30)
    file = tmp_path / "group.txt"
    file.write_text(left.id.hex())
    groups.release(tmp_path)
    deadline = time.monotonic() + 30
    while placement_group_table(left)["state"] != "REMOVED" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert placement_group_table(left)["state"] == "REMOVED"
    assert not file.exists()
    file.write_text("ab" * (len(left.id.hex()) // 2))  # of a cluster that is no more
    groups.release(tmp_path)
    assert not file.exists()
