"""What real ranks record."""

import contextlib
import io
import os
import time

import pytest
from models import HIDDEN, MICRO_BATCH, Block, build, data, ds_config
from pool import RankPool
from torch import nn

from ds_fold.events import COMPUTE, DATA_PARALLEL, WAITING
from ds_fold.schedule import actions as op
from ds_fold.trace import read
from ds_fold.trace.files import WAITS, WORK, load, messages
from ds_fold.trace.report import measure

SKEW_S = 1000.0


def train(folder, fold, P, layers, M=4, zero=0, steps=(1, 4), batches=6, skew_s=0.0, **more):
    """Train; returns this rank's program, and what it printed."""
    fold = {**fold, "trace": {"enabled": True, "steps": list(steps), "path": os.path.join(folder, "traces")}}
    engine = build(False, ds_config(M, zero, fold=fold, **more), P, len(layers), layers=layers)
    clock = engine._recorder.clock
    engine._recorder.clock = lambda: clock() + skew_s * engine.global_rank
    iterator = data(engine.grid.get_data_parallel_rank())
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for _ in range(batches):
            engine.train_batch(iterator)
    program = [str(a) for a in engine.train_schedule().program.ranks[engine.stage_id]]
    engine.destroy()
    return program, [line for line in said.getvalue().splitlines() if "ds_fold" in line]


class Sleep(nn.Module):
    """A forward of set length, and a backward of twice that."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(0.1 * nn.Linear(HIDDEN, HIDDEN).weight.detach())

    def forward(self, x):
        time.sleep(self.seconds)
        y = x + x @ self.weight
        y.register_hook(lambda grad: time.sleep(2 * self.seconds))
        return y


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory):
    """AIAO with both overlaps on 2 x 2 ranks whose clocks are far apart: (folder, programs, log of rank 0)."""
    folder = tmp_path_factory.mktemp("aiao")

    def task():
        fold = {"schedule": "aiao", "segments": 2, "overlap_grad_reduce": "segment", "overlap_param_gather": True}
        return train(str(folder), fold, P=2, layers=[Block() for _ in range(8)], zero=1, skew_s=SKEW_S,
                     csv_monitor={"enabled": True, "output_path": str(folder), "job_name": "monitor"})

    programs, logs = zip(*RankPool.of(4).run(task, timeout=300))
    assert not any(logs[1:])
    return folder, programs, logs[0]


def test_each_action_is_recorded_once_a_step_in_order(overlapped):
    folder, programs, _ = overlapped
    assert sorted(os.listdir(folder / "traces")) == [f"rank{rank}.json" for rank in range(4)]
    timeline = read(str(folder / "traces"), warn=pytest.fail)
    assert (timeline.P, timeline.D, timeline.v, timeline.M, len(timeline.steps)) == (2, 2, 2, 4, 4)
    for rank, program in enumerate(programs):
        trace = load(str(folder / "traces" / f"rank{rank}.json"))
        assert [str(a) for a in trace.actions] == program
        assert [step.number for step in trace.steps] == [1, 2, 3]
        assert all(step.marks == sorted(step.marks) for step in trace.steps)
        mine = sorted((e for e in timeline.events if e.rank == rank and e.track in (COMPUTE, WAITING)), key=lambda e: e.start)
        assert [e.action for e in mine] == 3 * [word for word in program if op.Action.parse(word).op in WORK | WAITS]
        assert all(a.end <= b.start + 1e-6 for a, b in zip(mine, mine[1:]))


def test_clocks_that_differ_are_aligned(overlapped):
    folder, _, _ = overlapped
    for rank in range(4):
        trace = load(str(folder / "traces" / f"rank{rank}.json"))
        assert trace.clock_offset == pytest.approx(-SKEW_S * rank, abs=0.02)
    timeline = read(str(folder / "traces"))
    assert 0 < timeline.steps[-1] < SKEW_S / 2


def test_messages_meet_and_are_not_received_before_they_are_sent(overlapped):
    folder, programs, _ = overlapped
    timeline = read(str(folder / "traces"))
    pairs = messages(timeline)
    assert len(pairs) == 3 * sum(word.startswith(("SA", "SG")) for program in programs for word in program)
    ends = {}  # of waits: the same message comes once a step
    for e in sorted(timeline.events, key=lambda e: e.start):
        if e.track == WAITING:
            ends.setdefault((e.rank, e.action), []).append(e.end)
    for i, j in pairs:
        send, receive = timeline.events[i], timeline.events[j]
        assert send.bytes == receive.bytes == MICRO_BATCH * HIDDEN * 4
        # half of the fastest exchange is what clocks may be off
        assert ends[receive.rank, "W" + receive.action].pop(0) > send.start - 2e-3


def test_reductions_are_in_flight_behind_backwards(overlapped):
    folder, _, _ = overlapped
    timeline = read(str(folder / "traces"))
    begin, end = timeline.steps[1:3]
    for rank in range(4):
        events = {e.action: e for e in timeline.events if e.rank == rank and begin <= e.start < end}
        assert events["B1.3"].end <= events["R1"].start <= events["B0.0"].start and events["B0.3"].end < events["R1"].end
        numel = 2 * sum(p.numel() for p in Block().parameters())  # two layers a chunk, of which one half is sent
        assert events["R1"].bytes == events["G0"].bytes == 4 * -(-numel // 4) * 4 // 2
        gathers = [e for e in timeline.events if e.rank == rank and e.action == "G1"]
        assert any(e.start < end < e.end for e in gathers)  # waited for in the next step
    for i in range(3):
        assert 0 < measure(timeline)[i].hidden_data_parallel < 1


def test_rank_0_reports_each_step(overlapped):
    folder, _, log = overlapped
    timeline = read(str(folder / "traces"))
    assert [line.split(":")[0] for line in log[:3]] == ["ds_fold step 1", "ds_fold step 2", "ds_fold step 3"]
    assert log[3].endswith(f"python -m ds_fold trace {folder / 'traces'} -o timeline.html") and len(log) == 4
    for name in measure(timeline)[0]._fields:
        [path] = folder.rglob(f"*Train_Fold_{name}*.csv")
        rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
        samples = 4 * MICRO_BATCH * 2  # a step
        assert [int(float(x)) for x, _ in rows] == [2 * samples, 3 * samples, 4 * samples]
        assert [float(y) for _, y in rows] == pytest.approx([getattr(measure(timeline)[i], name) for i in range(3)], abs=1e-5,
                                                                rel=1e-5)


def test_memory_is_counted_in_the_step_before(overlapped):
    folder, _, log = overlapped
    timeline = read(str(folder / "traces"))
    peaks = [load(str(folder / "traces" / f"rank{rank}.json")).peak_bytes for rank in range(4)]
    numel = 4 * sum(p.numel() for p in Block().parameters())  # of a rank, in fp32: parameters, gradients, half of Adam's states
    assert all(12 * numel < peak < 16 * numel for peak in peaks)
    samples = 4 * MICRO_BATCH * 2
    expected = [samples / (end - begin) / max(peaks) * 2**30 for begin, end in zip(timeline.steps, timeline.steps[1:])]
    assert [metrics.memory_efficiency for metrics in measure(timeline)] == pytest.approx(expected)
    assert all("memory efficiency" in line for line in log[:3])


def test_bubble_of_1f1b_is_its_closed_form(tmp_path):
    def task():
        return train(str(tmp_path), {"schedule": "1f1b"}, P=2, layers=[Sleep(0.04), Sleep(0.04)], batches=4)

    RankPool.of(2).run(task, timeout=300)
    timeline = read(str(tmp_path / "traces"))
    bubbles = [measure(timeline)[i].bubble_fraction for i in range(3)]
    assert min(bubbles, key=lambda b: abs(b - 1 / 5)) == pytest.approx(1 / 5, abs=0.05)  # (P-1) / (M + P-1)
    forwards = [e.end - e.start for e in timeline.events if e.action.startswith("F")]
    assert len(forwards) == 3 * 8 and min(forwards) >= 0.04


def test_training_that_ends_early_leaves_what_was_recorded_and_blocking_reductions_are_exposed(tmp_path):
    def task():
        return train(str(tmp_path), {}, P=1, layers=[Block() for _ in range(2)], steps=(1, 100), batches=4)

    RankPool.of(2).run(task, timeout=300)
    timeline = read(str(tmp_path / "traces"), warn=pytest.fail)
    assert len(timeline.steps) == 4
    reductions = [(e.track, e.start, e.end) for e in timeline.events if e.action == "R0"]
    assert len([r for r in reductions if r[0] == DATA_PARALLEL]) == len([r for r in reductions if r[0] == WAITING]) == 6
    metrics = measure(timeline)[0]
    assert metrics.exposed_data_parallel_s > 0 and metrics.hidden_data_parallel == pytest.approx(0, abs=0.05)
