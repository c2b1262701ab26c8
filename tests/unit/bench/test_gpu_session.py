"""A session on a GPU: its budget, what it does after an interruption, and cases that hang or die. No engine runs here;
`tests/engines/vllm/test_gpu_session.py` rehearses all cases."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.gpu_session import runner, summary
from bench.gpu_session.journal import DONE, FAILED, LATE, STOPPED, Case, Journal
from bench.gpu_session.plan import ABLATIONS, METHODS, PARTS, Sizes, cases
from bench.gpu_session.runner import Runner, time_limit
from hybrid_backend.methods import method_names

ROOT = Path(__file__).parents[3]
# What the process of a case does, by the case's option ``does``; it gets the journal, a folder and the case.
CHILD = """
import json, subprocess, sys, time
from pathlib import Path
from bench.gpu_session.journal import Case, Journal
journal, logs, line = Journal(Path(sys.argv[1])), Path(sys.argv[2]), json.loads(sys.argv[3])
case = Case(line["part"], line["case"], line["options"], 0, 0)
journal.append("result", case, figures={"tokens_per_second": 12.5})
print("it began", flush=True)
if "server" in case.options["does"]:
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (logs / "server").write_text(str(server.pid))
if "dies" in case.options["does"]:
    raise SystemExit("ModuleNotFoundError: No module named 'jmespath'")
if "hangs" in case.options["does"]:
    time.sleep(600)
"""


def make(name: str, does: str = "ends", needs: float = 1, most: float = 60) -> Case:
    return Case("decode", name, {"does": does}, needs, most)


def make_runner(folder: Path, journal: Journal) -> Runner:
    environment = {"PYTHONPATH": str(ROOT)}
    return Runner(journal, folder / "logs", environment, ROOT, (sys.executable, "-c", CHILD), lambda _: None)


def run(folder: Path, made: Sequence[Case], seconds: float = 120) -> list[dict[str, Any]]:
    """Run a session and return the lines of the journal."""
    journal = Journal(folder / "session.jsonl")
    make_runner(folder, journal).run(made, seconds, lambda: None)
    return list(journal.lines())


def ends(lines: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(line["case"], line["status"]) for line in lines if line["event"] == "end"]


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


# -- the plan --


def test_the_parts_come_in_the_order_of_their_value() -> None:
    made = cases(Sizes("model", 1 << 30))
    assert list(dict.fromkeys(case.part for case in made)) == list(PARTS)
    assert len({case.name for case in made}) == len(made)
    assert all(0 < case.needs <= case.most for case in made)


def test_every_method_of_a_gpu_decodes_and_both_ablations() -> None:
    decoded = {case.options["run"]["kind"] for case in cases(Sizes("model", 1 << 30), ["decode"])}
    assert {*method_names()} - {"quest"} == set(METHODS), "quest decodes on CPUs alone"
    assert {*METHODS, *ABLATIONS, "FLASH_ATTN"} == decoded


def test_a_tuned_input_has_its_untuned_case_beside_it() -> None:
    spreads = {
        case.options["run"]["page_spread"]
        for case in cases(Sizes("model", 1 << 30), ["decode"])
        if case.options["run"]["kind"] == "scout"
    }
    assert spreads == {0.0, 0.03}


# -- the budget --


@pytest.mark.parametrize(("left", "limit"), [(30, 20), (60, 30), (1000, 100)])
def test_a_case_may_take_half_of_what_is_left_or_what_it_needs_and_never_more_than_its_most(
    left: float, limit: float
) -> None:
    assert time_limit(make("a", needs=20, most=100), left) == limit


def test_a_case_that_needs_more_than_is_left_makes_room_for_shorter_ones(tmp_path: Path) -> None:
    lines = run(tmp_path, [make("long", needs=1000), make("short")], seconds=60)
    assert ends(lines) == [("short", DONE)]


def test_nothing_begins_without_a_budget(tmp_path: Path) -> None:
    assert run(tmp_path, [make("a")], seconds=0) == []


# -- what goes wrong --


def test_a_case_that_dies_is_recorded_with_its_last_words_and_the_next_goes_on(tmp_path: Path) -> None:
    lines = run(tmp_path, [make("a", "dies"), make("b")])
    assert ends(lines) == [("a", FAILED), ("b", DONE)]
    log = next(line["log"] for line in lines if line["event"] == "end")
    assert log == ["it began", "ModuleNotFoundError: No module named 'jmespath'"]


@pytest.mark.parametrize("does", ["server hangs", "server dies"])
def test_a_late_or_dead_case_keeps_its_figures_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    """Its server is in a session of its own, as those of `hybrid_backend.tools.bench.servers` are."""
    monkeypatch.setattr(runner, "GRACE", 2.0)
    lines = run(tmp_path, [make("a", does, most=8), make("b")])
    assert ends(lines) == [("a", LATE if "hangs" in does else FAILED), ("b", DONE)]
    assert [line["figures"] for line in lines if line["event"] == "result" and line["case"] == "a"] == [
        {"tokens_per_second": 12.5}
    ]
    assert not is_alive(int((tmp_path / "logs" / "server").read_text()))


def test_a_session_that_is_stopped_stops_its_case_and_says_so(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from bench.gpu_session.journal import Journal
from tests.unit.bench.test_gpu_session import make, make_runner
folder = Path(sys.argv[1])
make_runner(folder, Journal(folder / "session.jsonl")).run([make("a", "server hangs"), make("b")], 120, lambda: None)
"""
    session = subprocess.Popen([sys.executable, "-c", script, tmp_path], stderr=subprocess.DEVNULL)
    try:
        server = tmp_path / "logs" / "server"
        deadline = time.monotonic() + 60
        while not (server.exists() and server.read_text()):
            assert session.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        session.send_signal(signal.SIGTERM)
        assert session.wait(60) != 0
    finally:
        session.kill()
    assert ends(list(Journal(tmp_path / "session.jsonl").lines())) == [("a", STOPPED)]
    assert not is_alive(int(server.read_text()))


# -- going on --


def test_a_second_start_leaves_out_what_is_done_and_tries_what_failed_last(tmp_path: Path) -> None:
    first = [make("a", "dies"), make("b")]
    assert ends(run(tmp_path, first)) == [("a", FAILED), ("b", DONE)]
    again = ends(run(tmp_path, [*first, make("c")]))
    assert again[2:] == [("c", DONE), ("a", FAILED)]


def test_a_case_with_other_options_is_not_the_one_that_was_done(tmp_path: Path) -> None:
    run(tmp_path, [make("a")])
    assert ends(run(tmp_path, [make("a", "ends otherwise")])) == [("a", DONE), ("a", DONE)]


def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "session.jsonl")
    journal.append("end", make("a"), status=DONE)
    with journal.path.open("a") as file:
        file.write('{"event": "end", "case": "b", "sta')
    journal.append("end", make("c"), status=DONE)
    assert [line["case"] for line in journal.lines()] == ["a", "c"]
    assert journal.ends(make("a")) == [DONE] and journal.ends(make("b")) == []


def test_a_session_that_is_killed_has_kept_every_figure_and_goes_on(tmp_path: Path) -> None:
    """By a signal that no program can catch, in the middle of its second case."""
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from bench.gpu_session.journal import Journal
from tests.unit.bench.test_gpu_session import make, make_runner
folder = Path(sys.argv[1])
made = [make("a"), make("b", "server hangs")]
make_runner(folder, Journal(folder / "session.jsonl")).run(made, 120, lambda: None)
"""
    session = subprocess.Popen([sys.executable, "-c", script, tmp_path], start_new_session=True)
    server = tmp_path / "logs" / "server"
    deadline = time.monotonic() + 60
    while not (server.exists() and server.read_text()):
        assert session.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    started = psutil.Process(session.pid).children(recursive=True)
    session.kill()
    session.wait()
    for process in started:
        os.kill(process.pid, signal.SIGKILL)
    journal = Journal(tmp_path / "session.jsonl")
    assert [line["case"] for line in journal.lines() if line["event"] == "result"] == ["a", "b"]
    made = [make("a"), make("b", "server hangs"), make("c")]
    text = summary.write(tmp_path / "summary.md", journal, made)
    assert "| b | not ended | | |\n| | | | tokens_per_second 12.5 |" in text and "| c | not begun | | |" in text
    assert ends(run(tmp_path, [make("a"), make("b", "server hangs", most=5)]))[1:] == [("b", LATE)]


# -- the table --


def test_the_table_says_what_is_no_measurement_and_what_rests_on_a_tuned_input(tmp_path: Path) -> None:
    journal, case = Journal(tmp_path / "session.jsonl"), make("decode-80-scout")
    journal.append("session", rehearsal=True, machine={"GPU": "none"})
    journal.append("begin", case)
    journal.append("result", case, figures={"step_ms": 16.912, "page_spread": 0.03, "kernels": {"a": 1}})
    journal.append("end", case, status=DONE, seconds=90.2, log=["bye"])
    text = summary.write(tmp_path / "summary.md", journal, [case])
    assert "no measurements" in text and "tuned input" in text
    assert "| decode-80-scout | done | 90 |  |\n| | | | step_ms 16.91, page_spread 0.03 |" in text
    assert json.loads(journal.path.read_text().splitlines()[0])["machine"] == {"GPU": "none"}


def test_the_table_shows_the_last_try_with_the_reason_of_its_failure(tmp_path: Path) -> None:
    journal, case = Journal(tmp_path / "session.jsonl"), make("serve")
    for step_ms, log in ((1.0, "first | reason"), (2.0, "second | reason")):
        journal.append("begin", case)
        journal.append("result", case, figures={"step_ms": step_ms})
        journal.append("end", case, status=FAILED, seconds=3, log=[log])
    text = summary.write(tmp_path / "summary.md", journal, [case])
    assert "| serve | failed | 3 | second / reason |\n| | | | step_ms 2 |" in text and "first" not in text
    assert "tuned" not in text and "no measurements" not in text
