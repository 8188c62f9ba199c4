"""All that is refused of a valid spec because Kubernetes, KubeRay or HCCL would not take what follows from it.

It is checked here, once; the builders take what passed and cannot fail.
"""

from __future__ import annotations

from rljob_api import derived
from rljob_api.local_files import local_files
from rljob_api.profiles import HardwareProfile
from rljob_api.spec import RLJobSpec
from rljob_operator.kubernetes_objects import Manifest, block_of
from rljob_operator.render.errors import RenderError
from rljob_operator.render.hardware import resolve
from rljob_operator.render.object_names import secret_name
from rljob_operator.render.overrides import merge_template
from rljob_operator.render.pods import check_sizes, head_template, own_labels, worker_size, worker_template
from rljob_operator.render.policy import check_policy
from rljob_operator.render.ray_cluster import check_ray, ray_cluster, valid_spec
from rljob_operator.render.settings import RenderSettings, short
from rljob_operator.render.submission import check_manifest
from rljob_operator.render.volumes import check_run_folder, check_volumes
from rljob_operator.state.observed import JobView
from rljob_operator.state.sandboxes import warm_pool


def render_cluster(job: JobView, settings: RenderSettings, *, checked: bool = False) -> Manifest:
    """The RayCluster of a job.

    Args:
        job: the job.
        settings: the operator's.
        checked: it was rendered before with these settings: what can be seen of the spec alone is not looked at again.

    Raises:
        RenderError: for what Kubernetes, KubeRay or HCCL would not take.
    """
    spec = valid_spec(job)
    profile = resolve(spec)
    if not checked:
        check(job, spec, profile, settings)
    labels = own_labels(job.name, spec, profile)
    head = head_template(job.name, spec, profile, settings, secret_name(job.name))
    workers = [
        merge_template(
            worker_template(job.name, spec, profile, settings, group), spec.pods.worker, labels, "spec.pods.worker"
        )
        for group in derived.node_groups(spec)
    ]
    # The user's templates can be judged only where they are merged: what they may hold is all that a pod may.
    head = merge_template(head, spec.pods.head, labels, "spec.pods.head")
    check_policy(job, spec, settings)
    for worker in workers:
        check_run_folder(spec, block_of(head, "spec"), block_of(worker, "spec"))
    return ray_cluster(job, spec, profile, settings, head, workers)


def check_renderable(job: JobView, settings: RenderSettings) -> str:
    """Say why a valid spec cannot be rendered, in a sentence that names the field; empty: it can."""
    try:
        render_cluster(job, settings)
    except RenderError as error:
        return str(error)
    return ""


def check(job: JobView, spec: RLJobSpec, profile: HardwareProfile, settings: RenderSettings) -> None:
    """Refuse what the builders could make nothing of.

    Args:
        job: the job.
        spec: its spec, which is valid.
        profile: its hardware, with its overrides.
        settings: the operator's.

    Raises:
        RenderError: the first problem, with its field.
    """
    check_ray(spec, profile, settings)
    _check_image(spec, settings)
    _check_files(spec)
    _check_sandboxes(spec, settings)
    check_sizes(spec, profile)
    for group in derived.node_groups(spec):
        check_volumes(spec, profile, worker_size(spec, profile, group).shared_memory)
    check_manifest(job, settings)


def _check_files(spec: RLJobSpec) -> None:
    """Refuse files that lie beside the manifest, which no pod has."""
    for field, file in local_files(spec):
        if not file.startswith("/"):
            right = "on a cluster the path is absolute, below a volume of spec.storage.volumes or in the image"
            raise RenderError(field, f"{short(file)} lies beside the manifest, where no pod sees it; {right}")


def _check_sandboxes(spec: RLJobSpec, settings: RenderSettings) -> None:
    if warm_pool(spec) is not None and settings.sandbox_claims is False:
        text = "the operator has no right to make SandboxClaims: it needs settings.sandboxClaims: true of its chart"
        raise RenderError("spec.sandbox.service.warmPool", text)


def _check_image(spec: RLJobSpec, settings: RenderSettings) -> None:
    image = settings.image(spec)
    if not image:
        profile = spec.resources.profile.value
        raise RenderError("spec.image", f"is missing, and the operator has no default for profile {profile}")
    if any(character.isspace() or not character.isprintable() for character in image):
        raise RenderError("spec.image", f"{short(image)} is no image: it holds white space or control characters")
