import json
from pathlib import Path

import pytest

from ds_fold.config import ConfigError, FoldConfig, fold_config, load_config, micro_batches_of


def test_without_a_block_it_is_plain_1f1b():
    for config in ({}, None, {"train_batch_size": 4}):
        fold = fold_config(config)
        assert (fold.schedule, fold.segments, fold.preset) == ("1f1b", 1, "1f1b")


def test_json_hjson_and_dict_say_the_same(tmp_path):
    block = {"gradient_accumulation_steps": 8, "ds_fold": {"schedule": "aiao", "segments": 4}}
    (tmp_path / "a.json").write_text(json.dumps(block))
    (tmp_path / "b.json").write_text("""{
      # a comment
      gradient_accumulation_steps: 8
      ds_fold: { schedule: aiao   # no quotes, no commas
      segments: 4 }
    }""".replace("aiao   # no quotes, no commas", '"aiao", // quoted'))
    for config in (block, str(tmp_path / "a.json"), tmp_path / "b.json"):
        assert load_config(config)["gradient_accumulation_steps"] == 8
        fold = fold_config(config)
        assert (fold.schedule, fold.segments) == ("aiao", 4)


EARLY = {"schedule": "aiao", "segments": 4, "overlap_grad_reduce": "segment", "optimizer_step": "post_validated"}


@pytest.mark.parametrize("block,message", [
    ({"schedul": "aiao"}, r"ds_fold\.schedul: unknown key \(did you mean 'schedule'\?\); known keys are schedule, segments"),
    ({"schedule": "aioa"}, r"ds_fold\.schedule: 'aioa' is not a schedule \(did you mean 'aiao'\?\); use one of gpipe"),
    ({"schedule": 7}, r"ds_fold\.schedule: .*got 7"),
    ({"schedule": {"fil": "x"}}, r"ds_fold\.schedule\.file: field required"),
    ({"trace": {"step": [3, 6]}}, r"trace\.step: unknown key \(did you mean 'steps'\?\); known keys are enabled, steps, path"),
    ({"trace": {"steps": [6, 3]}}, r"ds_fold\.trace\.steps: \[6, 3\] must be \[first, one past the last\] global step"),
    ({"trace": {"steps": [0, 5000]}}, r"ds_fold\.trace\.steps: .*at most 1000 steps apart"),
    ({"trace": True}, r"ds_fold\.trace: .*got True"),
    ({"segments": "four"}, r"ds_fold\.segments: .*valid integer.*got 'four'"),
    ({"segments": 0}, r"ds_fold\.segments: .*greater than or equal to 1, got 0"),
    ({"segments": True}, r"ds_fold\.segments: .*got True"),
    ({"segments": 2.5}, r"ds_fold\.segments: .*got 2\.5"),
    ({"last_segment": "1F1B"}, r"ds_fold\.last_segment: '1F1B' is not one of '1f1b', 'all_forward' \(did you mean"),
    ({"head_backward": "now"}, r"ds_fold\.head_backward: 'now' is not one of 'scheduled', 'immediate'"),
    ({"micro_batch_group": -1}, r"ds_fold\.micro_batch_group: .*got -1"),
    ({"optimizer_step": "early"}, r"ds_fold\.optimizer_step: 'early' is not one of 'validated', 'post_validated'"),
    ({"optimizer_step": "post_validated"}, r"ds_fold\.optimizer_step: .*overlap_grad_reduce='off' reduces all.*\"segment\", or"),
    ({"early_segments": [1]}, r"ds_fold\.early_segments: \[1\] says .*optimizer_step='validated' steps nothing before; set"),
    ({**EARLY, "early_segments": [2, 0, 4]}, r"ds_fold\.early_segments: \[0, 4\] are not in 1\.\.3: segments=4, of which"),
    ({"align_grad_reduce": True}, r"ds_fold\.align_grad_reduce: .*overlap_grad_reduce='off' reduces all at the end; set"),
    ({"align_grad_reduce": True, "overlap_grad_reduce": "layer"}, r"ds_fold\.align_grad_reduce: .*'layer' launches within"),
    ({"partition": [0, "x"]}, r"ds_fold\.partition\.1: .*got 'x'"),
    ({"receive_ahead": 0}, r"ds_fold\.receive_ahead: .*got 0"),
    ({"overlap_grad_reduce": "layers"}, r"ds_fold\.overlap_grad_reduce: 'layers' is not one of 'off', 'segment', 'layer' \(did"),
    ({"comm_chunk_bytes": 100}, r"ds_fold\.comm_chunk_bytes: .*greater than or equal to 1024, got 100"),
    ({"comm_chunk_bytes": "4MB"}, r"ds_fold\.comm_chunk_bytes: .*got '4MB'"),
    ({"recompute": "some"}, r"ds_fold\.recompute: 'some' is not one of 'none', 'all', 'auto'"),
    ({"recompute": [3, 1]}, r"ds_fold\.recompute: \[3, 1\] must be ascending layer indices"),
    ({"recompute": "auto"}, r"recompute 'auto' needs to know what the layers take: set ds_fold\.profile"),
    ({"partition": {"method": "speed"}}, r"^ds_fold\.partition\.method: input should be 'memory_efficiency', .*got 'speed'$"),
    ({"partition": {"metod": "memory"}}, r"ds_fold\.partition\.metod: unknown key \(did you mean 'method'\?\); known keys are"),
    ({"partition": {"method": "memory"}}, r"partition 'memory' needs to know what the layers take: set ds_fold\.profile"),
    (["aiao"], r"ds_fold must be an object"),
])
def test_wrong_keys_types_and_values_are_one_message(block, message):
    with pytest.raises(ConfigError, match=message):
        fold_config({"ds_fold": block})


def test_the_preset_hippie_sets_what_the_block_leaves_open():
    keys = ("head_backward", "overlap_grad_reduce", "overlap_param_gather", "objective", "recompute")

    def expanded(**block):
        fold = fold_config({"ds_fold": {"schedule": "hippie", **block}})
        return [getattr(fold, key) for key in keys]

    assert expanded() == ["immediate", "layer", True, None, "none"]
    assert expanded(profile="p.json") == ["immediate", "layer", True, "memory_efficiency", "auto"]
    assert expanded(partition={"method": "memory", "profile": "p.json"}) == ["immediate", "layer", True, "memory", "auto"]
    assert expanded(profile="p.json", overlap_grad_reduce="off", partition=[0, 1, 2], recompute="all",
                    head_backward="scheduled", overlap_param_gather=False) == ["scheduled", "off", False, None, "all"]
    with pytest.raises(ConfigError, match=r"schedule='hippie' has one chunk per pipeline rank, but ds_fold\.segments=2"):
        fold_config({"ds_fold": {"schedule": "hippie", "segments": 2}}).check(2, 4, 8)
    fold = fold_config({"ds_fold": {"schedule": "hippie"}})
    plain = FoldConfig(schedule="1f1b", overlap_grad_reduce="layer", overlap_param_gather=True)
    assert fold.train_program(4, 6, 1).format() == plain.train_program(4, 6, 1).format()


def test_all_wrong_keys_are_named_at_once():
    with pytest.raises(ConfigError) as error:
        fold_config({"ds_fold": {"segments": 0, "colour": "red"}})
    assert "ds_fold.segments" in str(error.value) and "ds_fold.colour" in str(error.value)


@pytest.mark.parametrize("block,P,M,layers,message", [
    (dict(schedule="1f1b", segments=4), 4, 8, 32, r"schedule='1f1b'.*segments=4; use segments=1 or"),
    (dict(schedule="aiao", segments=4), 4, 8, 15, r"15 layers cannot fill .*segments=4 x 4 .*= 16 chunks; use segments <= 3"),
    (dict(schedule="aiao", segments=2, micro_batch_group=3), 4, 8, 8, r"micro_batch_group=3.*4\.\.8"),
    (dict(schedule="1f1b", last_segment="all_forward"), 4, 8, 8, r"last_segment='all_forward' belongs to schedule 'aiao'"),
    (dict(recompute=[1, 8]), 4, 8, 8, r"recompute names layer 8, but there are 8 layers; use indices in 0\.\.7"),
    (dict(schedule={"file": "gone.csv"}), 2, 4, 8, r"gone\.csv.*cannot be read"),
    (dict(schedule={"file": "gone.csv"}, micro_batch_group=4), 2, 4, 8, r"micro_batch_group has no meaning"),
])
def test_impossible_combinations_are_refused(block, P, M, layers, message):
    with pytest.raises(ConfigError, match=message):
        FoldConfig(**block).check(P, M, layers)


@pytest.mark.parametrize("P,M", [(1, 1), (2, 1), (4, 3), (3, 7), (8, 8)])
def test_few_micro_batches_and_remainders_run(P, M):
    for block in (dict(schedule="aiao", segments=3), dict(schedule="interleaved_1f1b", segments=3), dict(schedule="gpipe")):
        fold = FoldConfig(**block)
        fold.check(P, M, 3 * P)
        assert fold.train_program(P, M).M == M


@pytest.mark.parametrize("text,message", [("{", "neither JSON nor HJSON"), ("[1]", "must hold one JSON object"),
                                          ('{"a": 1, "a": 2}', "key 'a' appears twice")])
def test_broken_files(tmp_path, text, message):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(str(tmp_path / "c.json"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nothing.json.*cannot be read"):
        load_config(str(tmp_path / "nothing.json"))


@pytest.mark.parametrize("config,D,M", [
    ({"gradient_accumulation_steps": 8}, None, 8),
    ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, 2, 8),
    ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, None, None),
    ({"train_batch_size": 64}, 2, 1),
])
def test_micro_batches_as_deepspeed_derives_them(config, D, M):
    assert micro_batches_of(config, D) == M


def test_every_key_is_documented():
    import inspect
    source = inspect.getsource(FoldConfig)
    for key in FoldConfig.model_fields:
        line = next(i for i, text in enumerate(source.splitlines()) if text.strip().startswith(f"{key}:"))
        assert source.splitlines()[line + 1].strip().startswith('"""'), key


def test_the_readme_has_every_key():
    table = (Path(__file__).parent.parent / "README.md").read_text()
    assert [key for key in FoldConfig.model_fields if f"`{key}`" not in table] == []


@pytest.mark.parametrize("segments, early, expected", [
    (4, {}, {1, 2, 3}), (2, {}, {1}), (1, {}, set()), (4, {"early_segments": []}, set()), (4, {"early_segments": [3, 1]}, {1, 3}),
])
def test_which_segments_are_stepped_early(segments, early, expected):
    fold = FoldConfig(**{**EARLY, "segments": segments, **early})
    assert {a.segment for actions in fold.train_program(2, 4, 1).ranks for a in actions if a.op == "S"} == expected
