"""Messages for a user whose manifest is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from manifests import DESIGN_EXAMPLE, manifest

from rljob_api.algorithms import ALGORITHMS
from rljob_api.validation import ManifestError, load_manifest


def problems(document: object) -> list[str]:
    with pytest.raises(ManifestError) as error:
        load_manifest(document)  # type: ignore[arg-type]
    return [str(problem) for problem in error.value.problems]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["rollout.topP=1.5"], "spec.rollout.topP: 1.5: is too large; allowed: number, above 0 and at most 1"),
        (
            ["algorithm.clipHigh=hot"],
            'spec.algorithm.clipHigh: "hot": is a string; allowed: number, above 0 and at most 1000000000',
        ),
        (["steps='3000'"], 'spec.steps: "3000": is a string; allowed: whole number, at least 1'),
        (["steps=2.5"], "spec.steps: 2.5: is a number; allowed: whole number, at least 1"),
        (["steps=null"], "spec.steps: is missing; allowed: whole number, at least 1"),
        (["suspend=1"], "spec.suspend: 1: is a whole number; allowed: true or false"),
        (["image=7"], 'spec.image: 7: is a whole number (write it in quotes: "..."); allowed: string, not empty'),
        (
            ["rollout.stop=end"],
            'spec.rollout.stop: "end": is a string; allowed: list of string, not empty (at most 32)',
        ),
        (
            ["training.optimizer.lr=.nan"],
            "spec.training.optimizer.lr: NaN: is not finite; allowed: number, above 0 and at most 1",
        ),
        (
            ["training.optimizer.lr=.inf"],
            "spec.training.optimizer.lr: Infinity: is not finite; allowed: number, above 0 and at most 1",
        ),
        (
            ["algorithm.kl.estimator=k4"],
            'spec.algorithm.kl.estimator: "k4": is not one of the allowed values; allowed: one of k1, k2, k3, low_var',
        ),
        (
            ["mode=Disaggregated", "resources={profile: ascend-a3, trainer: {nodes: 2}}"],
            "spec.resources.rollout.nodes: either both groups have nodes of their own or neither; allowed: given with "
            "resources.trainer.nodes, or left out with it: trainers and engines on one machine",
        ),
        (
            ["training.backend=FSDP"],
            "spec.training.tensorParallel: 2: FSDP divides parameters row by row, and gathers each layer whole; "
            "allowed: 1 with backend FSDP, whose fsdp.shardSize says what is divided; with backend Megatron any "
            "tensorParallel",
        ),
        (
            ["algorithm.name=dpo"],
            'spec.algorithm.name: "dpo": is not one of the allowed values; allowed: one of ' + ", ".join(ALGORITHMS),
        ),
        (
            ["training.tensorParallel=3"],
            "spec.training.tensorParallel: 3: the job's devices cannot be divided into model replicas; allowed: "
            "training.tensorParallel x training.pipelineParallel divides nodes x devicesPerNode of resources (with "
            "mode Disaggregated or Async: of resources.trainer)",
        ),
        (
            ["training.globalBatchSize=96"],
            "spec.training.globalBatchSize: 96: the step's samples cannot be divided into optimizer updates; allowed: "
            "training.globalBatchSize divides rollout.promptsPerStep x rollout.samplesPerPrompt",
        ),
        (
            ["rollout.engineArgs.tensor_parallel_size=4"],
            "spec.rollout.engineArgs.tensor_parallel_size: 4: RLJob sets this engine argument itself; allowed: "
            "spec.rollout.tensorParallel instead",
        ),
    ],
)
def test_message(changes: list[str], message: str) -> None:
    assert problems(manifest(*changes)) == [message]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["training.tensorParalel=2"],
            "spec.training.tensorParalel: 2: unknown field, did you mean tensorParallel?; allowed: ",
        ),
        (
            ["training.tensor_parallel=2"],
            "spec.training.tensor_parallel: 2: unknown field, did you mean tensorParallel?",
        ),
        (["data.prompt-key=a"], 'spec.data.prompt-key: "a": unknown field, did you mean promptKey?'),
        (
            ["topK=5"],
            "spec.topK: 5: unknown field, there is spec.algorithm.distill.topK and spec.rollout.topK; allowed: ",
        ),
        (
            ["training.lr=1"],
            "spec.training.lr: 1: unknown field, there is spec.critic.optimizer.lr and spec.training.optimizer.lr; "
            "allowed: ",
        ),
        (["metadata.label=a"], 'metadata.label: "a": unknown field, did you mean labels?'),
        (
            ["ste\u0440s=5"],
            "spec[ste\u0440s]: 5: unknown field (holds U+0440 CYRILLIC SMALL LETTER ER), did you mean steps?",
        ),
        (["training.zzz=1"], "spec.training.zzz: 1: unknown field; allowed: backend, fsdp, lora, "),
    ],
)
def test_unknown_fields_name_the_nearest(changes: list[str], message: str) -> None:
    found = problems(manifest(*changes))
    assert len(found) == 1
    assert found[0].startswith(message)


def test_all_problems_at_once() -> None:
    found = problems(
        manifest(
            "stepz=1",
            "steps=0",
            "seed=-1",
            "rollout.topP=2",
            "training.tensorParallel=3",
            "data.applyChatTemplate=null",
            "data.sources[0].promptKey=x",
            "timeouts.phases={rolout: 3}",
            "reward.name=null",
        )
    )
    blamed = [
        "spec.stepz: 1: unknown field, did you mean steps?",
        "spec.steps: 0: is too small",
        "spec.seed: -1: is too small",
        "spec.rollout.topP: 2: is too large",
        "spec.training.tensorParallel: 3: the job's devices",
        "spec.data: {",
        'spec.data.sources[0]: {"promptKey": "x"}: needs exactly one of path, synthetic and seeds',
        'spec.timeouts.phases: {"rolout": 3}: names a phase that does not exist',
        'spec.reward: {"name": null}: needs exactly one of name, python and parts',
    ]
    for start in blamed:
        assert sum(text.startswith(start) for text in found) == 1, (start, found)
    assert len(found) == len(blamed)


def test_a_rule_is_silent_about_fields_that_are_already_blamed() -> None:
    assert problems(manifest("training.globalBatchSize=-7")) == [
        "spec.training.globalBatchSize: -7: is too small; allowed: whole number, at least 1"
    ]
    assert len(problems(manifest("rollout.promptsPerStep=x", "training.globalBatchSize=96"))) == 1
    assert len(problems(manifest("rollout=5"))) == 1


def test_the_error_names_the_file_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(DESIGN_EXAMPLE.replace("steps: 3000", "steps: 0").replace("keep: 3", "keep: 0"))
    with pytest.raises(ManifestError) as error:
        load_manifest(path)
    assert str(error.value).splitlines()[0] == f"{path}: 2 problems"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spec:\n  steps: [1\n", "line 3, column 1: "),
        ("a: 1\nb: {c: 1, c: 2}\n", "line 2, column 11: key 'c' is there twice"),
        ("a: 1\n\tb: 2\n", "line 2, column 1: "),
        ("a: 1\n---\nb: 2\n", "2 documents; one is expected"),
        ("- 1\n- 2\n", "[1, 2]: is no mapping; allowed: an RLJob: apiVersion, kind, metadata, spec"),
        ("# nothing\n", "is empty; allowed: "),
        ("", "is empty; allowed: "),
        ("a: !!python/object:os.system x\n", "line 1, column 4: "),
        ("a: 1\nb:\n\tc: 2\n", "line 3, column 1: found character '\\t' that cannot start any token; YAML is in"),
        (
            "b:\n  a: 1\n\u00a0 c: 2\n  d: 3\n",
            "line 4, column 4: mapping values are not allowed here; line 3 begins with ",
        ),
        ("a: {{ .Values.steps }}\n", "line 1, column 5: a key is not a scalar; '{{' is a template's"),
        ("a:\n<<<<<<< HEAD\n  b: 1\n=======\n  b: 2\n>>>>>>> main\n", "line 3, column 4: could not find expected"),
    ],
)
def test_text_that_is_no_manifest(text: str, message: str) -> None:
    found = problems(text)
    assert len(found) == 1
    assert found[0].startswith(message)


def test_a_mark_of_a_merge_is_named() -> None:
    (found,) = problems("a:\n<<<<<<< HEAD\n  b: 1\n=======\n  b: 2\n>>>>>>> main\n")
    assert found.endswith("; line 2 is a mark of a merge that was not resolved")


def test_what_is_too_long_is_told_how_long_it_may_be() -> None:
    (found,) = problems(manifest(f"image={'a' * 5000}"))
    assert found.endswith("is too long; allowed: string, not empty and at most 4096 characters")


def test_a_text_with_thousands_of_unknown_fields_is_told_so_at_once() -> None:
    job = manifest()
    job["spec"] |= {f"k{number}": 1 for number in range(3000)}
    found = problems(job)
    assert len(found) == 101
    assert found[-1] == "2900 further problems of such kinds are not listed"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert problems(tmp_path / "none.yaml") == ["there is no such file"]
    assert problems(str(tmp_path / "none.yaml")) == ["there is no such file"]
    assert problems(tmp_path) == ["is a folder; allowed: a file with an RLJob"]
    (tmp_path / "binary.yaml").write_bytes(b"\x80\x81\x00")
    assert problems(tmp_path / "binary.yaml")[0].startswith("cannot be read: ")
    (tmp_path / "other.yaml").write_bytes("steps: 1".encode("utf-16"))
    assert problems(tmp_path / "other.yaml")[0].startswith("is UTF-16; a manifest is UTF-8 ")


def test_scalars_are_read_as_the_api_server_reads_them() -> None:
    text = DESIGN_EXAMPLE.replace("lr: 1.0e-6", "lr: 1e-6").replace(
        "image: registry.example/rljob-worker:0.1.0", "image: 2026-01-31"
    )
    job = load_manifest(text)
    assert job.spec.training.optimizer.lr == 1e-6
    assert job.spec.image == "2026-01-31"
    assert problems(DESIGN_EXAMPLE.replace("promptKey: prompt", "promptKey: y")) == [
        'spec.data.promptKey: true: is true or false (write it in quotes: "..."); allowed: string, not empty'
    ]
    assert load_manifest(DESIGN_EXAMPLE.replace("registry.example/rljob-worker:0.1.0", "1:30")).spec.image == "1:30"


def test_null_is_the_default() -> None:
    assert load_manifest(manifest("training=null", "seed=null")).spec.seed == 1234
    assert load_manifest(manifest("data.labelKey=null", "reward={python: a:b}")).spec.data.label_key is None


@pytest.mark.parametrize(
    "change",
    [
        "storage.volumes=[{name: a, mountPath: /a, claim: a}, {name: b, mountPath: /a, claim: b}]",
        "storage.volumes=[{name: a, mountPath: /a, claim: a}, {name: a, mountPath: /b, claim: b}]",
        "evaluation={sets: [{name: a, path: /a}, {name: a, path: /b}]}",
        "records.trackers=[{name: wandb}, {name: wandb}]",
        "data={sources: [{name: a, path: /a}, {name: a, path: /b}]}",
        "reward={parts: [{name: math}, {name: math, python: 'a.b:c'}]}",
        "scheduling.tolerations=[{operator: Exists, value: a}]",
    ],
)
def test_a_value_is_shown_as_it_was_written(change: str) -> None:
    found = problems(manifest(change))
    assert found
    for text in found:
        assert "namespace(" not in text, text
        assert "Spec(" not in text, text
        assert "mount_path" not in text, text
    lists = [text for text in found if ": [" in text]
    assert all(': [{"' in text for text in lists)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("true", "spec.data.skip[1]: true: has the wrong type; allowed: a whole number or a string"),
        ("1.5", "spec.data.skip[1]: 1.5: has the wrong type; allowed: a whole number or a string"),
        ("-1", "spec.data.skip[1]: -1: is too small; allowed: Input should be greater than or equal to 0"),
        ("a b", 'spec.data.skip[1]: "a b": has the wrong form; allowed: String should match pattern'),
        ("[1]", "spec.data.skip[1]: [1]: has the wrong type; allowed: a whole number or a string"),
    ],
)
def test_a_value_of_several_types_has_one_problem(value: str, message: str) -> None:
    with pytest.raises(ManifestError) as error:
        load_manifest(manifest(f"data.skip=[0, {value}]"))
    assert [str(problem)[: len(message)] for problem in error.value.problems] == [message]
