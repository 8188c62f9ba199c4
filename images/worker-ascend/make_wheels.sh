#!/usr/bin/env bash
# Makes the two wheels that no index has from their projects' repositories, and writes their hashes: `make ascend-wheels`.
# Run it in a container of the image's base, for the memory saver is compiled against CANN's headers:
#   docker run --rm -v "$PWD":/rljob -w /rljob quay.io/ascend/vllm-ascend:v0.23.0.post1 bash images/worker-ascend/make_wheels.sh
# SAVER_REPOSITORY, SAVER_COMMIT, MINDSPEED_REPOSITORY, MINDSPEED_COMMIT: other places (a mirror, a folder) and revisions.
# SAVER_PATCH: a file that is applied to the memory saver before it is built.
set -euo pipefail

saver_repository=${SAVER_REPOSITORY:-https://github.com/sgl-project/sgl-kernel-npu}
saver_commit=${SAVER_COMMIT:-87df718a2f15161d3120e4e1dfd19b30afca7cbf}
saver_patch=${SAVER_PATCH:+$(realpath -- "$SAVER_PATCH")}
mindspeed_repository=${MINDSPEED_REPOSITORY:-https://gitcode.com/Ascend/MindSpeed}
mindspeed_commit=${MINDSPEED_COMMIT:-e4772499}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

# checkout REPOSITORY COMMIT FOLDER: the very revision, whatever the repository's branches are by now.
checkout() {
  git clone --quiet --no-checkout -- "$1" "$3"
  git -C "$3" checkout --quiet --detach "$2"
  local found
  found=$(git -C "$3" rev-parse HEAD)
  [[ $found == "$2"* ]] || { echo "$1: $2 is no commit but a name of $found; give the commit" >&2; exit 1; }
}

# take PACKAGE FOLDER: the one wheel of a package that lies there.
take() {
  local wheels=("$2/$1"-*.whl)
  [[ -e ${wheels[0]} && ${#wheels[@]} -eq 1 ]] || { echo "$2 has not one wheel of $1 after its build" >&2; exit 1; }
  cp -- "${wheels[0]}" "$made/"
}

checkout "$saver_repository" "$saver_commit" "$made/saver"
[[ -z $saver_patch ]] || git -C "$made/saver" apply -- "$saver_patch"
(cd "$made/saver" && bash build.sh -a memory-saver)
take torch_memory_saver "$made/saver/output"

checkout "$mindspeed_repository" "$mindspeed_commit" "$made/mindspeed"
python3 -m pip wheel --no-deps --no-index --no-build-isolation --wheel-dir "$made/mindspeed/output" "$made/mindspeed"
take mindspeed "$made/mindspeed/output"

# Both are there: what was there before goes, so that the image's build finds one of each.
mkdir -p "$here/wheels"
rm -f "$here"/wheels/{torch_memory_saver,mindspeed}-*.whl
mv -- "$made"/*.whl "$here/wheels/"
cd "$here"
sha256sum wheels/*.whl > wheels/SHA256SUMS
cat wheels/SHA256SUMS
