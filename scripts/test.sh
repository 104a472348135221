#!/usr/bin/env bash
# The fast tests in parallel, then the end-to-end pass; the last line is pytest's own summary.
#
# Environment: PYTEST_WORKERS (default 2) processes for the fast tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pytest=.venv/bin/pytest

end_to_end=true
if ! grep -rqE 'mark\.e2e' tests --include='*.py'; then
  echo "test: no test is marked e2e, so there is no end-to-end pass"
  end_to_end=false
fi
echo "== fast tests"
"$pytest" -m "not slow and not e2e" -n "${PYTEST_WORKERS:-2}" --dist loadscope
if $end_to_end; then
  echo "== end-to-end pass"
  "$pytest" -m e2e
fi
