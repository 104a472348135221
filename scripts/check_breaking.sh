#!/usr/bin/env bash
# Compares protos/ with a published state of them: does a change break programs that speak the contract?
#
#   scripts/check_breaking.sh [REFERENCE]
#
# REFERENCE is a git revision. Without it: the last tag; where there is no tag, the point at which this branch left main
# (on main itself: the last commit). A clone without that history, or a revision without protos, has nothing to compare,
# and this says so and succeeds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
buf=${BUF:-.venv/bin/buf}

skip() { echo "buf breaking: nothing to compare: $*"; exit 0; }

find_reference() {
  local tag branch
  if tag=$(git describe --tags --abbrev=0 2> /dev/null); then
    echo "$tag"
    return
  fi
  for branch in main origin/main; do
    git rev-parse -q --verify "$branch^{commit}" > /dev/null || continue
    git merge-base "$branch" HEAD 2> /dev/null && return
  done
  return 0
}

git rev-parse -q --verify HEAD > /dev/null 2>&1 || skip "this is not a git checkout with a commit"
reference=${1:-$(find_reference)}
[[ -n $reference ]] || skip "no tag, and main is not in this clone (a shallow one?)"
git rev-parse -q --verify "$reference^{commit}" > /dev/null || { echo "buf breaking: git knows no revision '$reference'" >&2; exit 2; }
git rev-parse -q --verify "$reference:protos" > /dev/null || skip "$reference has no protos/"

# A plain copy rather than buf's own git input: it needs no history, and this buf.yaml judges both sides.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git archive "$reference" protos | tar -x -C "$work"
cp buf.yaml "$work/"
echo "buf breaking: against $(git log -1 --format='%h (%s)' "$reference")"
"$buf" breaking --against "$work"
