#!/usr/bin/env bash
# Commit an emitted file to a repository and push it: a hook of `tune watch` for GitOps.
#
#   commit-and-push.sh FILE REPOSITORY BRANCH PATH
#
# FILE becomes PATH on BRANCH of REPOSITORY, which is cloned anew each time, so that nothing is
# left over from a run that was cut off. Says so and does nothing if PATH has these contents.
# Never forces: when somebody else was faster, it starts again from what they pushed.
set -euo pipefail

readonly tries=3

fail() {
  printf 'error: %s\nhint:  %s\n' "$1" "$2" >&2
  exit 2
}

(($# >= 4)) || fail "expected FILE REPOSITORY BRANCH PATH, got $# words" \
  "give each as a --hook word of its own"
readonly file=$1 repository=$2 branch=$3 path=$4
[[ -f $file && -s $file ]] || fail "$file is no file, or empty" "name what --emit writes"
case "/$path/" in
  *//* | */./* | */../* | */.git/*)
    fail "$path must be a path inside of the repository" "for example vllm/best.yaml" ;;
esac
# tune writes a file that holds secrets so that its owner alone may read it.
(((8#$(stat -L -c %a -- "$file") & 8#044) != 0)) || fail \
  "$file is for its owner alone, so it may hold secrets" \
  "choose a --format without them; if there are none, chmod a+r it"

# Ask nobody for a password: there is nobody.
export GIT_TERMINAL_PROMPT=0 GIT_SSH_COMMAND="${GIT_SSH_COMMAND:-ssh -o BatchMode=yes}"
export GIT_AUTHOR_NAME="${GIT_AUTHOR_NAME:-tune}"
export GIT_AUTHOR_EMAIL="${GIT_AUTHOR_EMAIL:-tune@localhost}"
export GIT_COMMITTER_NAME="${GIT_COMMITTER_NAME:-$GIT_AUTHOR_NAME}"
export GIT_COMMITTER_EMAIL="${GIT_COMMITTER_EMAIL:-$GIT_AUTHOR_EMAIL}"

folder=$(realpath -- "$(mktemp -d)")
readonly folder
trap 'rm -rf -- "$folder"' EXIT

# Subject: the limits. Body: why, and the evidence, which stands in the file as comments.
message() {
  local limits verb=Tune
  [[ ${TUNE_EVENT:-change} != rollback ]] || verb='Roll back'
  limits=$(sed -nE 's/^(max-num-(seqs|batched-tokens)): *([0-9]+).*/\1 \3/p' -- "$file" \
    | paste -sd, - | sed 's/,/, /g')
  printf '%s %s%s\n\n' "$verb" "$path" "${limits:+: $limits}"
  [[ -z ${TUNE_WHY:-} ]] || printf '%s\n\n' "$TUNE_WHY"
  sed -nE 's/^# ?//p' -- "$file"
}

commit_and_push() {
  local clone=$1
  git clone --quiet --no-tags --depth 1 --branch "$branch" -- "$repository" "$clone"
  [[ $(realpath -m -- "$clone/$path") == "$clone/$path" && ! -d $clone/$path ]] || fail \
    "$path is a folder or leads through a symbolic link" "name a file of the repository"
  mkdir -p -- "$(dirname -- "$clone/$path")"
  cp -- "$file" "$clone/$path"
  git -C "$clone" --literal-pathspecs add -- "$path"
  if git -C "$clone" diff --cached --quiet; then
    echo "$path is on $branch already"
    return 0
  fi
  message | git -C "$clone" commit --quiet --cleanup=whitespace --file=-
  git -C "$clone" push --quiet origin "HEAD:refs/heads/$branch" || return 1
  echo "pushed $path to $branch: $(git -C "$clone" log -1 --format='%h %s')"
}

for ((try = 1; try <= tries; try++)); do
  ((try == 1)) || sleep 1
  # Not as a condition, which would switch `set -e` off inside.
  set +e
  (set -e; commit_and_push "$folder/$try")
  code=$?
  set -e
  case $code in
    0) exit 0 ;;
    2) exit 2 ;;
  esac
  echo "try $try of $tries ended with $code" >&2
done
fail "$path could not be pushed to $branch of $repository" "git says above why"
