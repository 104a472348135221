#!/usr/bin/env bash
# Generates the Python protobuf and gRPC stubs from protos/ into worldserve/wire/generated/, or checks them.
#
#   scripts/generate_stubs.sh            write the stubs
#   scripts/generate_stubs.sh --check    compare with the committed ones; exit code 1 when they differ
#
# protoc's Python plugins import a file's neighbours by the proto path (`from worldserve.v1 import common_pb2`), and a
# Python package `worldserve.v1` would then have to exist beside the code. So the stubs are flat modules of
# `worldserve.wire.generated`, and that one import line is rewritten. The descriptors keep their names
# ("worldserve/v1/common.proto", package worldserve.v1), so the wire and reflection are as the protos say.
# Files without a service get no *_pb2_grpc.py. The tools' versions are pinned in pyproject.toml (extra `dev`).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
target=worldserve/wire/generated
check=false
case "${1:-}" in
  "") ;;
  --check) check=true ;;
  *) echo "usage: scripts/generate_stubs.sh [--check]" >&2; exit 2 ;;
esac
if ! "$python" -c 'import grpc_tools' 2>/dev/null; then
  echo "generate_stubs: $python has no grpcio-tools; run \`make setup\` first (or set PYTHON)." >&2
  exit 2
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m grpc_tools.protoc -Iprotos --python_out="$work" --pyi_out="$work" --grpc_python_out="$work" \
  protos/worldserve/v1/*.proto

stubs=$work/stubs
mkdir "$stubs"
for file in "$work"/worldserve/v1/*; do
  if [[ $file == *_pb2_grpc.py ]] && ! grep -q 'Stub' "$file"; then
    continue
  fi
  sed -E 's/^from worldserve\.v1 import /from worldserve.wire.generated import /' "$file" > "$stubs/${file##*/}"
done
if grep -lE '^(from|import) worldserve\.v1' "$stubs"/*; then
  echo "generate_stubs: the files above still import worldserve.v1; the plugin's output changed, adapt the sed line." >&2
  exit 1
fi
cat > "$stubs/__init__.py" <<'PYTHON'
"""Stubs made from protos/worldserve/v1 by scripts/generate_stubs.sh; never edited by hand."""
PYTHON

if $check; then
  if diff -rq -x __pycache__ "$target" "$stubs" >&2; then
    echo "stubs: $target is fresh"
    exit 0
  fi
  echo "generate_stubs: $target is not what protos/ makes. Run scripts/generate_stubs.sh and commit the result." >&2
  exit 1
fi
mkdir -p "$target"
find "$target" -maxdepth 1 -type f -delete
cp "$stubs"/* "$target"/
echo "stubs: wrote $(ls "$target"/*_pb2*.py | wc -l) modules to $target"
