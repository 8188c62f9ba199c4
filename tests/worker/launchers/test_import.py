"""Launch scripts of other frameworks become manifests, and every setting of them is accounted for."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from rljob_api.crd import custom_resource_definition
from rljob_api.validation import load_manifest
from rljob_worker.cli.import_job import manifest_text, problems_of
from rljob_worker.cli.main import main
from rljob_worker.launchers import frameworks, roll, slime, trl, variables, verl
from rljob_worker.launchers.draft import Draft, Setting, to
from rljob_worker.launchers.slime_rules import RULES

FILES = Path(__file__).parent / "files"
DOCS = Path(__file__).parents[3] / "docs"
CASES = {
    "vime.sh": ("vime", {}, None),
    "relax.sh": ("relax", {"MODEL_DIR": "/storage/models", "DATA_DIR": "/storage/data"}, None),
    "slime.sh": ("slime", {}, None),
    "verl.sh": ("verl", {"HOME": "/root"}, None),
    "roll.yaml": ("roll", {}, None),
    "trl.py": ("trl", {}, 8),
}
MISSING = {
    "roll.yaml": ["spec.reward.parts[0]"],
    "trl.py": ["spec.reward"],
    "verl.sh": ["spec.steps"],
}
"""Values that are not in the file, and that no default gives: rows x epochs, a function within the training script."""


def imported(name: str) -> frameworks.Imported:
    framework, given, devices = CASES[name]
    return frameworks.import_file(framework, FILES / name, variables=given, profile=None, devices=devices)


@pytest.mark.parametrize("name", CASES)
def test_manifest_and_account_are_those_of_the_golden_file(name: str) -> None:
    text = manifest_text(imported(name), CASES[name][0], name)
    golden = FILES / f"{name}.golden.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
def test_what_is_missing_alone_is_wrong(name: str) -> None:
    found = imported(name)
    assert [problem.split(":")[0] for problem in problems_of(found)] == MISSING.get(name, [])
    assert all(line.why for line in found.lines if not line.field)


LORA = {"rank": 32, "alpha": 64, "targets": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("framework", "settings", "lora"),
    [
        ("verl", {"actor_rollout_ref.model.lora_rank": "32", "actor_rollout_ref.model.lora_alpha": "64",
                  "actor_rollout_ref.model.target_modules": ["q_proj", "v_proj"]}, LORA),
        ("verl", {"actor_rollout_ref.model.lora_rank": "8", "actor_rollout_ref.model.target_modules": "all-linear"},
         {"rank": 8, "alpha": 16}),
        ("verl", {"actor_rollout_ref.model.lora_rank": "0"}, None),
        ("verl", {"actor_rollout_ref.model.lora_rank": "8", "actor_rollout_ref.actor.strategy": "megatron"}, None),
        ("roll", {"actor_train.model_args.lora_rank": 32, "actor_train.model_args.lora_alpha": 64,
                  "actor_train.model_args.lora_target": "q_proj,v_proj"}, LORA),
        ("roll", {"actor_train.model_args.lora_alpha": 64}, None),
        ("trl", {"use_peft": True, "lora_r": 32, "lora_alpha": 64, "lora_target_modules": ["q_proj", "v_proj"]}, LORA),
        ("trl", {"use_peft": True, "lora_target_modules": "all-linear"}, {"rank": 16}),
        ("trl", {"lora_r": 32}, None),
    ],
)  # fmt: skip
def test_adapters_are_taken_over(framework: str, settings: dict[str, object], lora: dict[str, object] | None) -> None:
    made, given = Draft(), [Setting(name, value) for name, value in settings.items()]
    if framework == "trl":
        trl.apply_settings(made, given, None)
    else:
        {"verl": verl, "roll": roll}[framework].apply_settings(made, given)
    assert made.get("training.lora") == lora
    assert (made.get("training.backend") == "FSDP") == (lora is not None)
    lines = {line.setting.split(" ")[0]: line for line in made.lines}
    assert all(lines[name].field or lines[name].why for name in settings)


ODD: list[object] = [None, "", "x", "1e999", "nan", "-1", True, [], ["a", "b"], {"a": {}}]


@pytest.mark.parametrize("value", ODD, ids=repr)
@pytest.mark.parametrize("framework", ["verl", "roll", "trl"])
def test_every_setting_is_accounted_for_whatever_its_value_is(framework: str, value: object) -> None:
    names = [name for name in {"verl": verl, "roll": roll, "trl": trl}[framework].RULES if "*" not in name]
    for given in ([Setting(name, value) for name in names], *([Setting(name, value)] for name in names)):
        made = Draft()
        if framework == "trl":
            trl.apply_settings(made, given, 8)
        else:
            {"verl": verl, "roll": roll}[framework].apply_settings(made, given)
        known = {line.setting.split(" ")[0] for line in made.lines}
        assert known >= {setting.name for setting in given if value is not None}


@pytest.mark.parametrize("value", ["", "x", "1e999", "-1", "a b", "$X"])
def test_so_is_every_flag(value: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    for mode in ("--colocate", ""):
        script.write_text(f"python3 train.py {mode} " + " ".join(f"{flag} {value}" for flag in RULES))
        found = frameworks.import_file("slime", script, variables={}, profile=None, devices=None)
        assert {line.setting.split(" ")[0] for line in found.lines} >= set(RULES) - {"--colocate"}


@pytest.mark.filterwarnings("error")
def test_a_script_is_not_warned_of() -> None:
    made = Draft()
    trl.apply_settings(made, list(trl.settings_of_script("x = '\\d'\nGRPOConfig(max_steps=3 if 1else 2)")), None)
    assert made.get("steps") is None


PARTIAL = "--colocate --rollout-batch-size 32 --partial-rollout"


@pytest.mark.parametrize(
    ("flags", "rollout"),
    [
        (PARTIAL, {"partial": {}}),
        (f"{PARTIAL} --over-sampling-batch-size 48", {"partial": {"factor": 1.5}}),
        (f"{PARTIAL} --over-sampling-batch-size 128", {"partial": {"factor": 4.0}, "staleness": {"max": 3}}),
        (f"{PARTIAL} --over-sampling-batch-size 64 --dynamic-sampling-filter-path a.check_reward_nonzero_std",
         {"partial": {"factor": 2.0}, "oversampling": {"filter": "ZeroVariance"}}),
        ("--rollout-batch-size 32 --partial-rollout --actor-num-gpus-per-node 1 --rollout-num-gpus 1", {}),
    ],
)  # fmt: skip
def test_partial_rollout_is_taken_over_as_a_job_can_have_it(
    flags: str, rollout: dict[str, object], tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    needed = "--hf-checkpoint /m --prompt-data /d.jsonl --num-rollout 3 --rm-type math --rollout-max-response-len 8"
    script.write_text(f"python3 train.py {needed} --n-samples-per-prompt 2 {flags}")
    found = frameworks.import_file("slime", script, variables={}, profile="cuda", devices=None)
    assert problems_of(found) == []
    spec = found.manifest["spec"]
    assert isinstance(spec, dict)
    assert {
        key: spec["rollout"][key] for key in ("partial", "staleness", "oversampling") if key in spec["rollout"]
    } == rollout
    assert ("tis" in spec["algorithm"]) == ("--colocate" in flags and not rollout)


@pytest.mark.parametrize(
    ("flags", "reward"),
    [
        ("--rm-type math --custom-rm-path my.rm --reward-key acc --group-rm",
         {"python": "my:rm", "signature": "Slime", "args": {"reward_key": "acc"}}),
        ("--custom-rm-path my.rm", {"python": "my:rm", "signature": "Slime"}),
        ("--rm-type deepscaler --reward-key acc --group-rm", {"name": "math"}),
    ],
)  # fmt: skip
def test_a_function_of_slime_s_takes_the_place_of_its_rewards(
    flags: str, reward: dict[str, object], tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    needed = "--hf-checkpoint /m --prompt-data /d.jsonl --num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 2"
    script.write_text(f"python3 train.py {needed} --rollout-max-response-len 8 --colocate {flags}")
    found = frameworks.import_file("slime", script, variables={}, profile="cuda", devices=None)
    assert problems_of(found) == []
    spec = found.manifest["spec"]
    assert isinstance(spec, dict)
    assert spec["reward"] == reward


@pytest.mark.parametrize(
    ("script", "data"),
    [
        ('load_dataset("a/b", split="test")', {"path": "a/b", "split": "test", "labelKey": None}),
        ('load_dataset("a/b", "main")["train"]',
         {"path": "a/b", "subset": "main", "split": "train", "labelKey": None}),
        ('load_dataset("json", data_files="rows.jsonl", split="train")', {"path": "rows.jsonl", "labelKey": None}),
        ('load_dataset("a/b", split="train").map(f)', {"labelKey": None}),
        ('load_dataset(NAME, split="train")', {"labelKey": None}),
        ('load_dataset("a/b", data_dir="c")', {"labelKey": None}),
    ],
)  # fmt: skip
def test_the_data_of_a_script_of_trl(script: str, data: dict[str, object]) -> None:
    text = f"rows = {script}\nGRPOTrainer(model='m', train_dataset=rows, reward_funcs=f, args=GRPOConfig(max_steps=3))"
    made = Draft()
    trl.apply_settings(made, list(trl.settings_of_script(text)), None)
    assert made.spec["data"] == data | {"applyChatTemplate": True}
    assert [line.setting for line in made.lines if not line.field and line.setting.startswith("train_dataset")] == (
        [] if "path" in data else ["train_dataset rows"]
    )


def test_parallel_sizes_clips_and_rewards_of_roll() -> None:
    strategy = "actor_train.strategy_args.strategy_config."
    given: dict[str, object] = {
        "adv_estimator": "grpo", "pg_clip": 0.1, "dual_clip_loss": True, "reward_clip": 5, "norm_mean_type": "batch",
        "norm_std_type": "group", "use_kl_loss": True, "kl_loss_coef": 0.01, "track_with": "wandb",
        "tracker_kwargs.project": "math", "tracker_kwargs.api_key": "hidden", "pg_clip_high": 0.3,
        f"{strategy}tensor_model_parallel_size": 2, f"{strategy}pipeline_model_parallel_size": 4,
        f"{strategy}expert_model_parallel_size": 8, f"{strategy}context_parallel_size": 2,
        f"{strategy}recompute_granularity": "selective", "add_token_level_kl": False,
        "actor_train.strategy_args.strategy_name": "megatron_train",
    }  # fmt: skip
    made = Draft()
    roll.apply_settings(made, [Setting(name, value) for name, value in given.items()])
    assert made.spec["algorithm"] == {
        "name": "grpo", "rewards": {"clip": 5, "center": "Batch", "scale": "Group"}, "clipLow": 0.1, "clipHigh": 0.1,
        "dualClip": 1.2, "kl": {"estimator": "k3", "coefficient": 0.01},
    }  # fmt: skip
    assert made.spec["training"] == {
        "tensorParallel": 2, "pipelineParallel": 4, "expertParallel": 8, "contextParallel": 2,
        "recompute": "Selective",
    }  # fmt: skip
    assert made.get("records.trackers") == [{"name": "wandb", "project": "math"}]
    assert all(line.field or line.why for line in made.lines)
    assert "hidden" not in str(made)
    named = {line.setting.split(" ")[0] for line in made.lines}
    assert given.keys() - named == set()
    again = Draft()
    roll.apply_settings(
        again, [Setting("use_pg_clip_range", True), Setting("pg_clip_high", 0.3), Setting("pg_clip", 0.1)]
    )
    assert again.spec["algorithm"] == {"clipHigh": 0.3}


def test_rows_that_verl_divides_are_counted_whole() -> None:
    for strategy, context in (("fsdp", {"contextParallel": 2, "maxTokensPerMicroBatch": 16384}), ("megatron", {})):
        given: dict[str, object] = {"strategy": strategy, "ulysses_sequence_parallel_size": 2}
        given["ppo_max_token_len_per_gpu"] = 8192
        made = Draft()
        verl.apply_settings(made, [Setting(f"actor_rollout_ref.actor.{name}", value) for name, value in given.items()])
        training = made.spec["training"]
        assert isinstance(training, dict)
        expected = {"contextParallel": None, "maxTokensPerMicroBatch": 8192} | context
        assert {name: training.get(name) for name in expected} == expected


def test_a_profile_that_the_file_names_is_not_assumed(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    for device, notes in (("trainer.device=npu", 0), ("", 1)):
        script.write_text(f"python3 -m verl.trainer.main_ppo data.train_batch_size=8 {device}")
        found = frameworks.import_file("verl", script, variables={}, profile=None, devices=None)
        assert sum("is assumed" in note for note in found.notes) == notes


def test_the_published_set_up_is_the_example_of_it() -> None:
    found = load_manifest(imported("vime.sh").manifest).spec
    example = load_manifest(DOCS.parent / "examples/qwen3-4b-grpo-8x910b1.yaml").spec
    assert (found.rollout.prompts_per_step, found.rollout.tensor_parallel) == (32, 2)
    for block in ("mode", "hccl", "memory_saver", "resources"):
        assert getattr(found, block) == getattr(example, block), block
    assert found.training.global_batch_size == example.training.global_batch_size


@pytest.mark.parametrize("rules", [slime.RULES, verl.RULES, roll.RULES, trl.RULES, variables.RULES])
def test_every_field_of_the_tables_exists(rules: dict[str, object]) -> None:
    schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name, rule in rules.items():
        node = schema["properties"]["spec"]
        for part in rule.path.split(".") if isinstance(rule, to) else ():
            if node.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in node:
                break
            assert part in node["properties"], f"{name}: {rule.path}"
            node = node["properties"][part]


def test_every_flag_of_the_documents_has_a_rule() -> None:
    text = (DOCS / "from-other-frameworks.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ") and len(line.split("|")) == 5]
    known = {*slime.RULES, "--runtime-env-json"}
    flags = {flag for row in rows for flag in re.findall(r"`(--[a-z0-9-]+)`", row[1])}
    assert len(flags) > 80
    assert flags <= known, flags - known
    names = {name for row in rows for name in re.findall(r"`((?:arr|data|trainer|algorithm)\.[a-z_.]+)`", row[2])}
    full = {name.replace("arr.", "actor_rollout_ref.") for name in names if not name.endswith(("vllm", "_metrics"))}
    assert len(full) > 40
    left = {name for name in full if name not in verl.RULES}
    assert not left


def test_the_command_writes_a_new_file_and_says_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "job.yaml"
    assert main(["import", "vime", str(FILES / "vime.sh"), "-o", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "settings taken over" in said.err
    assert "STEPS is set within a branch" in said.err
    assert "the array MODEL_ARGS is set nowhere" in said.err
    assert load_manifest(out).spec.steps == 3000
    assert main(["import", "vime", str(FILES / "vime.sh"), "-o", str(out)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["import", "trl", str(FILES / "trl.py")]) == 1
    said = capsys.readouterr()
    assert "give --devices N" in said.out
    assert "spec.rollout.promptsPerStep: is missing" in said.err


@pytest.mark.parametrize(
    ("framework", "name", "text", "message"),
    [
        ("vime", "a.sh", "echo hello", "has no command that starts vime: train.py or train_async.py was looked for"),
        ("verl", "a.sh", "python3 train.py", "has no command that starts verl"),
        ("verl", "a.yaml", "steps: 3", "has neither actor_rollout_ref nor data"),
        ("roll", "a.yaml", "steps: 3", "has no actor_train"),
        ("roll", "a.yaml", "a: [", "is no YAML"),
        ("roll", "a.sh", "echo", "is no YAML file: ROLL's settings are in the file that --config_name names"),
        ("slime", "a.yaml", "a: 1", "is YAML: slime has launch scripts"),
        ("trl", "a.py", "def f(:", "is no Python"),
        ("trl", "a.py", "x = 1", "makes neither a GRPOConfig nor a GRPOTrainer"),
        ("trl", "a.py", "(" * 100000, "is no Python"),
        ("vime", "a.sh", "python3 train.py '--lr", "line 1: ' is not closed"),
        ("vime", "a.sh", "\udcff", "is not UTF-8"),
        ("vime", "absent", None, "No such file or directory"),
    ],
)
def test_what_is_no_such_file_is_named(
    framework: str, name: str, text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert main(["import", framework, str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_values_that_are_wrong_are_left_with_the_reason_and_secrets_are_not_written(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "export HF_TOKEN=hf_secret\nexport HCCL_BUFFSIZE=many\n"
        "python3 train.py --colocate --num-rollout many --lr 1e-6x --rollout-batch-size $(nproc) --wandb-key secret "
        "--rm-type remote_rm --eval-prompt-data aime --hf-checkpoint 'a\x1b[2J\nb'"
    )
    found = frameworks.import_file("slime", script, variables={}, profile="cpu", devices=None)
    text = manifest_text(found, "slime", script.name)
    assert "secret" not in text.replace("a secret", "").replace("environment.secrets", "").replace(
        "Kubernetes secret", ""
    )
    why = {line.setting.split()[0]: line.why for line in found.lines if not line.field}
    assert why["--num-rollout"] == "'many' is no number"
    assert why["HCCL_BUFFSIZE"] == "'many' is no number"
    assert why["--lr"] == "'1e-6x' is no number"
    assert (
        "known only to a run: $(nproc); give --variable, or spec.rollout.promptsPerStep" in why["--rollout-batch-size"]
    )
    assert "not built in" in why["--rm-type"]
    assert "NAME PATH pairs" in why["--eval-prompt-data"]
    assert "\x1b" not in text
    assert found.manifest["spec"]["resources"] == {"profile": "cpu"}  # type: ignore[index]
