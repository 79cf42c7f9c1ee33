#!/usr/bin/env bash
# Put an emitted file into a ConfigMap that exists: a hook of `tune watch` in a cluster.
#
#   patch-configmap.sh CONFIGMAP FILE
#
# The file's name becomes the key; other keys stay. Needs the verbs get and patch on this one
# ConfigMap. Does nothing to what has these contents already.
set -euo pipefail

fail() {
  printf 'error: %s\nhint:  %s\n' "$1" "$2" >&2
  exit 2
}

(($# >= 2)) || fail "expected CONFIGMAP FILE, got $# words" \
  "give each as a --hook word of its own"
readonly name=$1 file=$2
readonly key=${file##*/}
[[ -f $file && -s $file ]] || fail "$file is no file, or empty" "name what --emit writes"
# tune writes a file that holds secrets so that its owner alone may read it.
(((8#$(stat -L -c %a -- "$file") & 8#044) != 0)) || fail \
  "$file is for its owner alone, so it may hold secrets, which a ConfigMap must not" \
  "choose a --format without them; if there are none, chmod a+r it"

# kubectl does the quoting: what it would create, of which the data alone is the patch.
data=$(kubectl create configmap "$name" --from-file="$key=$file" --dry-run=client \
  --output=jsonpath='{.data}')
kubectl patch configmap "$name" --type=merge --patch="{\"data\": $data}"
