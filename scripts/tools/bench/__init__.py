"""`scripts/bench`: benchmarks of this runner against mlx_lm.server, and against the loop without a server.

Contenders are measured A B A B on models made on the spot from a seed; ratios are taken round by round. While other
programs use the machine nothing is reported.

Read `__main__.py` (the command line, and the two functions that each benchmark has), then `report.py` and `servers.py`,
then the benchmark of interest: `start`, `decode`, `ttft`, `parallel`, `real`, `families`, `trace` (with `traces/`).
`llamas.py` makes the models and prompts, `family_models.py` those of other architectures, `gguf.py` the same for
llama.cpp. What must never grow is counted in tests, not measured here: see tests/model/engine/test_counts.py.
"""
