"""The short form of the soak (tests/soak.py, `make soak`)."""

import soak


def test_random_schedules_on_random_models_train_as_one_process():
    result = soak.soak(prove_count=80, run_count=6, seed=100_000, show=False)
    assert not result["failures"], "\n".join(message for _, message in result["failures"])
    assert result["proved"] == 80 and result["ran"] == 6 and result["largest_difference"] <= soak.TOLERANCE


def test_a_case_depends_on_its_seed_alone():
    assert str(soak.draw(7)) == str(soak.draw(7)) != str(soak.draw(8))


def test_cases_differ_in_everything_that_the_soak_promises():
    cases = [soak.draw(seed) for seed in range(300)]
    assert {case.fold["schedule"] for case in cases} == {"gpipe", "1f1b", "interleaved_1f1b", "aiao"}
    assert {case.P for case in cases} == {1, 2, 3, 4} and {case.D for case in cases} >= {1, 2, 4}
    layers = [layer for case in cases for layer in case.layers]
    assert {layer["kind"] for layer in layers} == {"block", "linear", "open", "close", "mask", "tied", "function"}
    assert any(layer["frozen"] for layer in layers) and any(case.dynamic_shape for case in cases)
