"""Stubs made from protos/worldserve/v1 by scripts/generate_stubs.sh; never edited by hand."""
