"""Low-rank adapters of other frameworks' settings."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_worker.launchers.draft import Draft, Setting, listed, number, take, text, value_of, whole

ALL_LINEAR = ("all-linear", "all_linear", "all")


def put_adapters(draft: Draft, rank: Setting | None, alpha: Setting | None, targets: Setting | None) -> None:
    """Put adapters into the draft where a rank above 0 is given; they are trained by FSDP alone."""
    given = [setting for setting in (rank, alpha, targets) if setting is not None]
    why = _why_not(draft, rank)
    if why:
        for setting in given:
            draft.leave(setting, why)
        return
    draft.assume("training.backend", "FSDP")
    take(draft, rank, "training.lora.rank", whole)
    take(draft, alpha, "training.lora.alpha", number)
    names: Sequence[str] = ()
    if targets is not None and value_of(draft, targets, _names, names)[:1] in [[name] for name in ALL_LINEAR]:
        draft.note(targets, "training.lora", "all linear modules of the layers, as by default")
    else:
        take(draft, targets, "training.lora.targets", _names)


def _why_not(draft: Draft, rank: Setting | None) -> str:
    if rank is None:
        return "no rank is given: all parameters are trained"
    if not rank.unknown and str(rank.value) in ("0", "None"):
        return "rank 0: all parameters are trained"
    if draft.get("training.backend") == "Megatron":
        return "training.lora, with training.backend FSDP: Megatron trains all parameters"
    return ""


def _names(value: object) -> Sequence[str]:
    """`q_proj,v_proj`, or a list of names."""
    return [name.strip() for one in listed(value) for name in text(one).split(",") if name.strip()]
