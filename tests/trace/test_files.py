"""Trace files and what is made of them, from recordings with known times."""

import json

import pytest
from trace_runs import recording

from ds_fold.events import COMPUTE, DATA_PARALLEL, PIPELINE, WAITING, Event, Timeline
from ds_fold.schedule import actions as op
from ds_fold.trace import TraceError, read
from ds_fold.trace.files import WAIT_OF, WAITS, WORK, assemble, load, messages, save
from ds_fold.trace.report import describe, measure


def test_what_was_saved_is_read(tmp_path):
    traces = [recording(rank, bytes={"SA0": 96}) for rank in range(2)]
    for trace in traces:
        assert load(save(trace, str(tmp_path / "new"))) == trace
    assert read(str(tmp_path / "new")) == assemble(traces)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["rank0.json", "rank1.json"]


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        save(recording(bytes={"SA0": object()}), str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_every_op_has_a_place():
    assert set(op.OPS) == WORK | WAITS | set(WAIT_OF)
    assert not WORK & WAITS and not set(WAIT_OF) & (WORK | WAITS)


def test_each_action_is_shown_once_a_step_and_transfers_from_launch_to_wait():
    traces = [recording(rank, P=2, v=2) for rank in range(2)]
    timeline = assemble(traces)
    assert timeline.steps == [0, 100, 100 + max(len(trace.actions) for trace in traces)]
    for trace in traces:
        mine = [e for e in timeline.events if e.rank == trace.rank]
        shown = [e.action for e in sorted(mine, key=lambda e: e.start) if e.track in (COMPUTE, WAITING)]
        assert shown == 2 * [str(a) for a in trace.actions if a.op in WORK | WAITS]
        for k in range(2):
            at = {str(a): i for i, a in enumerate(trace.actions)}
            reductions = [(e.start, e.end) for e in mine if e.action == f"R{k}"]
            assert reductions == [(at[f"R{k}"] + t, at[f"WR{k}"] + 1 + t) for t in (0, 100)]
            # before the first step; from the first step to the second; to the end of the last
            gathers = [(e.start, e.end) for e in mine if e.action == f"G{k}"]
            assert gathers == [(0, at[f"WG{k}"] + 1), (at[f"G{k}"], at[f"WG{k}"] + 101),
                               (at[f"G{k}"] + 100, len(trace.actions) + 100)]
    sends = [a for trace in traces for a in trace.actions if a.op in (op.SEND_ACT, op.SEND_GRAD)]
    pairs = messages(timeline)
    assert len(pairs) == 2 * len(sends)
    for send, receive in ((timeline.events[i], timeline.events[j]) for i, j in pairs):
        assert send.rank != receive.rank and send.action[1] == receive.action[1] and send.action[-1] == receive.action[-1]
        assert receive.end == send.end or receive.end == receive.start  # arrived when it was posted


def test_clocks_are_aligned():
    traces = [recording(0), recording(1)]
    assert assemble([recording(0, offset=5.0), recording(1, offset=-7.0)]) == assemble(traces)


def test_what_does_not_move_is_no_transfer_and_a_blocking_reduction_is_waited_for():
    timeline = assemble([recording(0, P=1, blocking_reduce=True, bytes={"G0": 0}, steps=1)])
    events = {(e.track, e.action): e.end - e.start for e in timeline.events if e.action in ("R0", "G0")}
    assert events == {(WAITING, "R0"): 1, (DATA_PARALLEL, "R0"): 1}


def test_metrics_of_a_known_step():
    events = [
        Event(0, COMPUTE, "L0.0", 0, 1), Event(0, COMPUTE, "F0.0", 1, 3), Event(0, COMPUTE, "B0.0", 9, 13),
        Event(1, COMPUTE, "F0.0", 4, 6), Event(1, COMPUTE, "B0.0", 6, 8), Event(1, COMPUTE, "STEP", 17, 20),
        # sent at 3, arrives at 4: one second of three is communication, two are bubble
        Event(0, PIPELINE, "SA0.0", 3, 4, 8), Event(1, PIPELINE, "RA0.0", 3, 4, 8), Event(1, WAITING, "WRA0.0", 1, 4),
        Event(0, WAITING, "WSA0.0", 8, 8.5),
        # 6 seconds in flight, of which rank 1 waits 3
        Event(1, DATA_PARALLEL, "R0", 8, 14), Event(1, DATA_PARALLEL, "G0", 9, 10), Event(1, WAITING, "WR0", 11, 14),
    ]
    metrics = measure(Timeline("", 2, 1, 1, 1, events, [0, 20, 30]))[0]
    assert metrics.step_s == 20
    assert metrics.bubble_fraction == pytest.approx(1 - 10 / 26)  # four computes in 13 seconds of two ranks
    assert metrics.exposed_data_parallel_s == 1.5 and metrics.hidden_data_parallel == 0.5
    assert metrics.exposed_pipeline_s == 0.75
    assert describe(metrics) == "2e+04 ms, bubble 61.5%, exposed data parallel 1.5e+03 (50% hidden), exposed messages 750"
    nothing = measure(Timeline("", 2, 1, 1, 1, events, [0, 20, 30]))[1]
    assert nothing.hidden_data_parallel is None and nothing.bubble_fraction == 0


def test_equal_steps_have_equal_metrics():
    """Many of them: a wait belongs to its own step's message, which comes first of those that are not over."""
    first, *others, _ = measure(assemble([recording(rank, v=2, M=5, steps=8) for rank in range(2)]))
    assert len(others) == 6 and first.exposed_pipeline_s > 0
    assert [metrics.exposed_pipeline_s for metrics in others] == pytest.approx([first.exposed_pipeline_s] * 6)


# bad input ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    for rank in range(4):
        save(recording(rank, D=2), str(tmp_path))
    return tmp_path


def read_warned(folder, **options):
    warnings = []
    timeline = read(str(folder), warn=warnings.append, **options)
    return sorted({event.rank for event in timeline.events}), timeline, warnings


def test_steps_are_chosen_by_their_number(folder):
    _, timeline, warnings = read_warned(folder, steps=(4, 9))
    assert len(timeline.steps) == 2 and timeline.about["first step"] == 4 and not warnings
    with pytest.raises(TraceError, match=r"--steps 7:9: .* holds steps 3:5"):
        read(str(folder), (7, 9))


def test_a_missing_rank(folder):
    (folder / "rank2.json").unlink()
    ranks, timeline, warnings = read_warned(folder)
    assert ranks == [0, 1, 3]
    assert len(warnings) == 1 and "no trace of rank 2; copy rank2.json" in warnings[0]
    assert 0 < measure(timeline)[0].bubble_fraction < 1


def test_a_truncated_file(folder):
    text = (folder / "rank1.json").read_text()
    (folder / "rank1.json").write_text(text[:len(text) // 2])
    ranks, _, warnings = read_warned(folder)
    assert ranks == [0, 2, 3] and len(warnings) == 2  # it is also missing
    assert "rank1.json is cut short" in warnings[0]


@pytest.mark.parametrize("change,message", [
    ({"schema": 99}, "has schema 99, but this ds_fold knows up to 1"),
    ({"schema": None}, "is not a trace of ds_fold"),
    ({"actions": "F0.0 X"}, "is damaged .*'X' is not an action"),
    ({"actions": "F0.0"}, "is damaged .*marks for 1 actions"),
    ({"steps": [{"number": 1}]}, "is damaged"),
    ({"rank": 9}, "is damaged .rank 9 of 4"),
])
def test_a_file_that_cannot_be_understood(folder, change, message):
    content = json.loads((folder / "rank1.json").read_text())
    (folder / "rank1.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(TraceError, match=message):
        load(str(folder / "rank1.json"))
    ranks, _, warnings = read_warned(folder)
    assert ranks == [0, 2, 3] and len(warnings) == 2


def test_traces_of_different_runs(folder):
    for rank in range(2):
        save(recording(rank, run="b", ended=1.0), str(folder))
    ranks, timeline, warnings = read_warned(folder)
    assert ranks == [0, 1] and timeline.about["run"] == "b" and len(warnings) == 1
    assert "mixes traces of different runs: the files of ranks 2, 3 belong to an older run" in warnings[0]


def test_nothing_to_show(tmp_path):
    with pytest.raises(TraceError, match="there is no folder"):
        read(str(tmp_path / "none"))
    with pytest.raises(TraceError, match="holds no trace"):
        read(str(tmp_path))
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").write_text("{")
    with pytest.warns(UserWarning, match="cut short"), pytest.raises(TraceError, match="no file in .* can be read"):
        read(str(tmp_path))
