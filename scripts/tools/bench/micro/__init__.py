"""Benchmarks of one part, without models: `nodes` (the trie), `wire` (lines over HTTP)."""
