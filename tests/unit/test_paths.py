"""Files that are written in folders shared with others."""

from __future__ import annotations

from pathlib import Path

from hybrid_backend.config.paths import write_whole
from hybrid_backend.tools.profile.store import Measurement, Store


def test_a_file_is_replaced_whole_and_not_through_a_link_under_its_temporary_name(
    tmp_path: Path,
) -> None:
    victim, target = tmp_path / "victim", tmp_path / "out.json"
    victim.write_text("precious")
    (tmp_path / ".out.json.part").symlink_to(victim)
    target.write_text("old")
    write_whole(target, b"new")
    assert target.read_text() == "new" and victim.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "victim"]


def test_a_stored_profile_does_not_write_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".m.json.part").symlink_to(victim)
    Store(tmp_path / "m.json").put("divergence:0", Measurement(kl=[0.5]))
    assert victim.read_text() == "precious"
    assert Store(tmp_path / "m.json").get("divergence:0").kl == [0.5]
