"""What the simulator says of steps that were measured on the emulated network, and are kept with the documentation."""

import re
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import simulator_error  # noqa: E402

MEASURED = BENCHMARKS.parent / "docs" / "benchmarks"


def test_measured_steps_are_predicted_and_ordered(monkeypatch, capsys):
    files = [str(MEASURED / f"{name}.json") for name in ("default", "smoke", "hide-500mbit-slow4", "v8-500mbit-slow2")]
    monkeypatch.setattr(sys, "argv", ["simulator_error.py", *files])
    simulator_error.main()
    out = capsys.readouterr().out
    assert "**default**" in out and "| DeepSpeed 1F1B | 1274 | " in out
    median, largest, steps, pairs, wrong = map(float, re.search(
        r"error: ([\d.]+) %, largest ([\d.]+) %, of (\d+) steps\. Of (\d+) pairs .* apart, (\d+) are", out).groups())
    assert median < 3 and largest < 10 and steps >= 15 and pairs >= 15
    assert wrong == 0


def test_the_fitted_overhead_is_the_one_that_steps_were_simulated_with():
    measured = {"setting": {"P": 2, "D": 2, "M": 4, "layers": 8, "forward_s": 0.005, "activation_bytes": 32768,
                            "parameter_bytes": 6_200_000},
                "lab": {"hosts": 4, "ranks_per_host": 1, "rate_mbit": 200}}
    measured["rows"] = [{"name": name, "free_s": simulator_error.step_s(measured, name, 7e-4, False)}
                        for name in ("ds_fold 1f1b", "ds_fold aiao v=2, overlapped")]
    assert simulator_error.fitted(measured) == pytest.approx(7e-4, rel=0.01)
    assert simulator_error.step_s(measured, "torch 1F1B", 0.0, True) is None, "it has no program"
