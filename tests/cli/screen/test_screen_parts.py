"""The parts of the live status without a terminal: keys, order, scrolling, lines."""

import re
from datetime import UTC, datetime

import pytest

from deadpool_run.cli.screen.keys import KeyReader
from deadpool_run.cli.screen.page import ScreenSize, screen_lines
from deadpool_run.cli.screen.rank_log import log_lines
from deadpool_run.cli.screen.state import Kill, Pane, Quit, RankOrder, ScreenState, first_order

NOW = datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC)


def status(count=512, per_node=8, **changed):
    ranks = [
        {
            "rank": rank,
            "worker": 1000 + rank,
            "pid": 40000 + rank,
            "phase": "running",
            "activity": "step",
            "step": 120,
            "step_ms": 12.3,
            "snapshots": [119, 120],
            "node": f"n{rank // per_node:02}",
            "local_rank": rank % per_node,
            "waiting": True,
            "cpu_cores": 1.02,
            "memory_bytes": 2_340_000_000,
        }
        for rank in range(count)
    ]
    nodes = [
        {"node": f"n{node:02}", "ranks": [*range(node * per_node, (node + 1) * per_node)]}
        for node in range(count // per_node)
    ]
    run = {"run_id": "night", "world_size": count, "spares": 8, "nodes": len(nodes), "started": NOW.isoformat()}
    spares = [{"worker": 2000 + number, "pid": 50000 + number, "phase": "ready", "node": "n63"} for number in range(8)]
    more = {"coordinator": {"node": "n00", "term": 0, "voters": ["n00"]}, "nodes": nodes} if len(nodes) > 1 else {}
    return {
        "phase": "running",
        "epoch": 1,
        "managed": True,
        "ranks": ranks,
        "spares": spares,
        "committed": 119,
        "run": run,
        **more,
        **changed,
    }


def lines(state, columns=80, count=24, log=lambda *_: []):
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in screen_lines(state, NOW, ScreenSize(columns, count), log)]


def shown_ranks(state, **size):
    return [int(line.split()[0]) for line in lines(state, **size) if re.match(r" *[0-9]+  n[0-9]", line)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"q?s", ["q", "?", "s"]),
        (b"\x1b[A\x1bOB\x1b[5~\x1b[6~\x1b[H\x1b[4~", ["up", "down", "page up", "page down", "home", "end"]),
        (b"\x1b[1;5Cq", ["q"]),
        (b"\x1b[200~k\x1b[201~", ["k"]),
        (b"\x1bq", ["escape", "q"]),
        ("é".encode(), ["é"]),
        (b"\x00\x01\r", ["enter"]),
    ],
)
def test_bytes_are_keys_however_they_are_split(data, expected):
    assert KeyReader().feed(data) == expected
    reader = KeyReader()
    if data != b"\x1bq":  # alone, an escape is a key of its own
        assert [key for byte in data for key in reader.feed(bytes([byte]))] == expected


def test_an_escape_alone_is_a_key_when_nothing_follows():
    reader = KeyReader()
    assert reader.feed(b"\x1b") == []
    assert reader.is_open
    assert reader.flush() == ["escape"]
    assert not reader.is_open


@pytest.mark.parametrize(("columns", "count"), [(80, 24), (200, 50), (40, 10), (20, 4), (1, 1), (300, 2)])
@pytest.mark.parametrize("pane", list(Pane))
def test_a_screen_has_the_size_of_the_terminal(columns, count, pane):
    state = ScreenState(status(incidents=[]), pane=pane)
    found = lines(state, columns, count, lambda _, most: [f"line {at} " * 40 for at in range(most)])
    assert len(found) == count
    assert max(map(len, found)) <= columns


def test_the_rate_does_not_follow_the_last_step():
    state = ScreenState(status(8, total_steps=1000))
    for look in range(20):
        now = status(8, total_steps=1000)
        for rank in now["ranks"]:
            rank |= {"step": 100 + 2 * look, "step_ms": 10.0 if look % 2 else 900.0}
        state.note(now)
        state.pace.note(100 + 2 * look, float(look))
    assert "step 138/1,000 (14 %)  2 steps/s  7m11s left" in "\n".join(lines(state))


def test_512_ranks_are_reached_in_a_few_keys_on_80_columns():
    state = ScreenState(status())
    first = shown_ranks(state)
    assert first == [*range(len(first))]
    assert len(first) >= 16
    assert f"1-{len(first)} of 512" in lines(state)[-1]
    state.press("page down")
    assert shown_ranks(state)[-1] == len(first)
    state.press("end")
    assert shown_ranks(state)[-1] == 511
    state.press("home")
    assert shown_ranks(state)[0] == 0
    for digit in "300":
        state.press(digit)
    assert state.selected == 300
    assert 300 in shown_ranks(state)
    state.press("up")
    assert state.selected == 299
    for digit in "512":
        state.press(digit)
    assert (state.selected, state.message) == (51, "there is no rank 512")


def test_the_slowest_first_is_the_one_that_the_others_wait_for():
    state = ScreenState(status())
    for _ in range(10):
        now = status()
        now["ranks"][77]["waiting"] = False
        now["ranks"][400] |= {"phase": "restoring", "step": 100}
        now["ranks"][33]["step"] = 119
        state.note(now)
    state.press("s")
    assert state.order is RankOrder.SLOWEST
    assert shown_ranks(state)[:4] == [400, 33, 77, 0]
    state.press("s")
    assert state.order is RankOrder.NODE
    assert shown_ranks(state)[:9] == [400, *range(401, 408), 77]
    state.press("s")
    assert state.order is RankOrder.RANK


def test_the_order_by_node_follows_the_nodes_and_is_there_for_several():
    moved = status(16)
    moved["ranks"][0]["node"] = "n01"
    state = ScreenState(moved, order=RankOrder.NODE)
    assert shown_ranks(state)[:8] == [1, 2, 3, 4, 5, 6, 7, 0]
    one = ScreenState(status(8))
    orders = []
    for _ in range(3):
        one.press("s")
        orders.append(one.order)
    assert orders == [RankOrder.SLOWEST, RankOrder.RANK, RankOrder.SLOWEST]


def outliers_of(change, looks=10):
    """Return the first ranks in the order by node, after looks at a job that `change` alters."""
    state = ScreenState(status(128, 8), order=RankOrder.NODE)
    for look in range(looks):
        now = status(128, 8)
        for rank in now["ranks"]:
            rank["waiting"] = (rank["rank"] + look) % 4 != 0
        change(now["ranks"])
        state.note(now)
    return [int(rank["rank"]) for rank in state.rows()][:10]


def test_by_node_the_node_with_an_outlier_is_first_and_in_it_the_outlier():
    of_node_9 = [*range(72, 80)]
    assert outliers_of(lambda ranks: ranks[77].update(phase="restoring")) == [77, *of_node_9[:5], 78, 79, 0, 1]
    assert outliers_of(lambda ranks: ranks[77].update(step=100)) == [77, *of_node_9[:5], 78, 79, 0, 1]
    assert outliers_of(lambda ranks: ranks[77].update(slowed=3.0)) == [77, *of_node_9[:5], 78, 79, 0, 1]
    assert outliers_of(lambda ranks: ranks[77].update(waiting=False)) == [77, *of_node_9[:5], 78, 79, 0, 1]


def test_by_node_the_rank_that_is_repaired_is_first_and_not_those_that_wait_for_it():
    def repaired(ranks):
        for rank in ranks:
            rank["phase"] = "aborted"
        ranks[77] |= {"phase": "rehearsing", "step": 0}

    assert outliers_of(repaired) == [77, *range(72, 77), 78, 79, 0, 1]


def test_by_node_ranks_alike_keep_their_places():
    assert outliers_of(lambda ranks: [rank.update(step=120 + rank["rank"] % 2) for rank in ranks]) == [*range(10)]
    assert outliers_of(lambda ranks: [rank.update(step_ms=float(rank["rank"])) for rank in ranks]) == [*range(10)]
    assert outliers_of(lambda ranks: ranks[100].update(step=200)) == [*range(10)]
    seldom = ScreenState(status(128, 8), order=RankOrder.NODE)
    for rank in range(128):
        seldom._waits[rank] = 0.1 * (rank % 3 > 0)
    assert [rank["rank"] for rank in seldom.rows()] == [*range(128)]
    assert outliers_of(lambda ranks: [rank.update(waiting=False) for rank in ranks]) == [*range(10)]


def test_nodes_are_in_the_order_of_their_numbers():
    state = ScreenState(status(16 * 8, 8), order=RankOrder.NODE)
    for rank in state.status["ranks"]:
        rank["node"] = f"gpu{rank['rank'] // 8}"
    assert [rank["rank"] for rank in state.rows()] == [*range(128)]


def test_the_first_rows_are_shown_until_a_rank_is_selected():
    assert (first_order(status(16)), first_order(status(8))) == (RankOrder.NODE, RankOrder.RANK)
    state = ScreenState(status(), order=RankOrder.NODE)
    lines(state)
    now = status()
    for rank in now["ranks"][200:248]:
        rank["phase"] = "restoring"
    state.note(now)
    assert shown_ranks(state)[0] == 200
    state.press("down")
    assert state.selected in shown_ranks(state)


def test_the_selection_stays_with_its_rank_in_another_order():
    state = ScreenState(status(), selected=300)
    state.press("s")
    lines(state)
    assert state.selected == 300
    state.note(status(8))
    assert state.selected == 7


def test_a_kill_needs_yes():
    state = ScreenState(status(), selected=5)
    for key in ("n", "enter", "escape", "k", "q"):
        assert state.press("k") is None
        assert "Kill rank 5 (worker 1005) of night with sigkill? [y/N]" in lines(state)[-1]
        assert state.press(key) is None
        assert "nothing was killed" in lines(state)[-1]
    state.press("k")
    assert state.press("y") == Kill(5, 1005)
    state.note({**status(), "ranks": [{**rank, "worker": None} for rank in status()["ranks"]]})
    assert state.press("k") is None
    assert lines(state)[-1].startswith("no worker holds rank 5 now")
    assert state.press("y") is None


@pytest.mark.parametrize("phase", ["starting", "setting up", "restarting"])
def test_the_question_says_that_the_job_is_not_protected(phase):
    state = ScreenState(status(phase=phase), selected=5)
    state.press("k")
    assert lines(state)[-1].rstrip() == "Not protected: all ranks restart, or the job ends. Kill rank 5? [y/N]"


def test_q_leaves_a_pane_before_it_leaves_the_status():
    state = ScreenState(status())
    for key in ("?", "l"):
        assert state.press(key) is None
        assert state.pane is not Pane.RANKS
        assert state.press("q") is None
        assert state.pane is Pane.RANKS
    assert state.press("q") == Quit()


def test_narrow_terminals_do_without_columns():
    state = ScreenState(status())
    head = {
        columns: next(line for line in lines(state, columns) if line.startswith("RANK")) for columns in (200, 60, 40)
    }
    assert [len(head[columns].split()) for columns in (200, 60, 40)] == [11, 7, 4]
    assert "PHASE" in head[40]


def test_the_table_of_nodes_and_the_repairs_are_there_if_they_fit():
    assert "ADDRESS" not in "\n".join(lines(ScreenState(status(512))))
    tall = lines(ScreenState(status(16)), 120, 50)
    assert "ADDRESS" in "\n".join(tall)
    assert len([line for line in tall if re.match(r" *[0-9]+  n0[01]", line)]) == 16


def test_the_log_of_a_rank_is_the_end_of_its_files(tmp_path):
    logs = tmp_path / "logs" / "night_x"
    (tmp_path / "run.json").write_text(f'{{"run_dir": "{tmp_path}", "log_dir": "{logs}"}}')
    one = status(8)
    assert "start the run with --tee 3" in log_lines(tmp_path, one, 3, 20)[1]
    folder = logs / "attempt_0" / "3"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text("".join(f"line {number}\n" for number in range(40_000)))
    (folder / "stderr.log").write_text("a \x1b[31mwarning\n")
    found = log_lines(tmp_path, one, 3, 10)
    assert found == [
        "--- attempt_0/3/stdout.log",
        *(f"line {number}" for number in range(39_993, 40_000)),
        "--- attempt_0/3/stderr.log",
        "a  [31mwarning",
    ]
    one["ranks"][3]["local_rank"] = 4
    assert "no log files" in log_lines(tmp_path, one, 3, 10)[0]
    (first, second) = log_lines(tmp_path, status(16), 9, 10)
    assert first == "rank 9 is on node n01, not on n00"
    assert second == "run `deadpool-run logs 1` there"


@pytest.mark.parametrize("key", ["k", "l"])
def test_a_key_acts_on_the_first_rank_that_is_shown_until_one_is_selected(key):
    behind = status(64, 8)
    behind["ranks"][40]["step"] = 3
    state = ScreenState(behind, order=RankOrder.NODE)
    assert shown_ranks(state)[0] == 40
    state.press(key)
    assert state.selected == 40
    assert (state.question is not None and state.question.rank == 40) == (key == "k")
