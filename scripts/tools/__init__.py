"""Tools for users and developers: the code behind the executables in scripts/, and libraries that tests use too.

For users, with the run-time dependencies alone: `host` (Ollama's interface without Ollama), `demo`, `real` (a trained
model), `conformance`, `soak` and `device`. For developers: `bench`, `docs`. `models` makes the tiny models that all of
them, and the tests, run on.

Imports point one way: `device` uses most of the others; `bench` and `soak` use `conformance`, `host` and `models`;
`demo` and `conformance` use `host` and `models`; `host` imports `demo` only when no model is named. No tool imports
`tests`. tests/tools/test_imports.py checks that, the packages that each tool needs, and that no modules import each
other in a circle.
"""

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
"""The repository."""
