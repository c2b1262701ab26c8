"""Other hardware than the one that was measured."""

from __future__ import annotations

import pytest

from hybrid_backend.errors import ConfigError
from hybrid_backend.hardware import Curve, find_hardware
from hybrid_backend.tools.plan.simulate import WhatIf, parse_what_if


def test_what_is_not_changed_stays() -> None:
    machine = find_hardware("a100")
    assert WhatIf().apply(machine) == machine
    assert WhatIf(context=1 << 20).apply(machine) == machine


def test_more_cores_stop_at_the_memory_that_was_full() -> None:
    """Eight channels of DDR4-3200 are full at 14 cores of 12 GB/s."""
    machine = find_hardware("a100")
    assert WhatIf(cores=128).apply(machine).host_read_achieved == machine.host_read_achieved
    assert WhatIf(cores=4).apply(machine).host_read_achieved == 4 * 12e9


def test_more_cores_continue_a_curve_that_still_rises() -> None:
    """A profile of two cores at 16 and 31 GB/s."""
    rising = Curve(points=((1, 16e9), (2, 31e9)), source="measured")
    machine = find_hardware("a100").replace(cores=2, host_read_bytes_per_s=rising, cpu_attention_bytes_per_s=rising)
    assert WhatIf(cores=4).apply(machine).host_read_achieved == 61e9
    assert WhatIf(cores=4, dram=50e9).apply(machine).host_read_achieved == 50e9
    assert "what if" in WhatIf(cores=4).apply(machine).host_read_bytes_per_s.source


def test_other_memory_is_what_all_cores_together_reach() -> None:
    machine = find_hardware("a100")
    assert WhatIf(dram=80e9).apply(machine).host_read_achieved == 80e9
    assert WhatIf(dram=400e9).apply(machine).host_read_achieved == pytest.approx(400e9)
    ratio = machine.cpu_attention_achieved / machine.host_read_achieved
    assert WhatIf(dram=80e9).apply(machine).cpu_attention_achieved == pytest.approx(80e9 * ratio)


def test_a_newer_link_is_faster_at_every_size() -> None:
    machine = find_hardware("a100")
    newer = WhatIf(pcie=5).apply(machine)
    for size in (4096, 131072, 1 << 24):
        assert newer.link_achieved(size) > machine.link_achieved(size)
    assert newer.host_device_bytes_per_s.best == pytest.approx(0.8 * 63e9, rel=0.01)


def test_the_name_tells_what_was_changed() -> None:
    assert WhatIf(cores=64, pcie=5, gpus=8, dram=3e11).apply(find_hardware("t4")).name == (
        "t4, DRAM 300 GB/s, 64 cores, PCIe 5, 8 devices"
    )


def test_changes_are_read_as_people_write_them() -> None:
    assert parse_what_if(["cores=64,pcie=5", "context=1M", " gpus = 8 ", "dram=307.2"]) == WhatIf(
        cores=64, pcie=5, context=1 << 20, gpus=8, dram=307.2e9
    )
    assert parse_what_if(["context=128k,batch=4"]) == WhatIf(context=131072, batch=4)


@pytest.mark.parametrize("text", ["", "cores", "cores=", "cores=many", "colour=3", "cores=-1", "cores=1.5", "gpus=0"])
def test_what_cannot_be_read_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match=r"what-if: .*expected"):
        parse_what_if([text])


@pytest.mark.parametrize("changes", [{"pcie": 2}, {"cores": 0}, {"gpus": -1}, {"dram": 0.0}])
def test_impossible_machines_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="what-if"):
        WhatIf(**changes).apply(find_hardware("t4"))  # type: ignore[arg-type]
