"""`scripts/host`: Ollama's HTTP interface over this runner, without Ollama, and the Ollama-like host below it.

`lib/` is the host as a library: it spawns, watches and ends runners as each generation of Ollama does. It knows nothing
of users' requests. The other modules are the interface: `curl` and the `ollama` program can use it.

Read `lib/__init__.py` first, then `main.py` (command line), `api.py` (routes), `go_json.py` (requests and answers, JSON
as Go reads and writes it, pictures), `openai.py` (OpenAI's interface, translated), `models.py` (models of a store or
directory). Chat templates come from strangers: `template.py` renders a chat in processes of `template_worker.py`.

One event loop owns everything; a template runs in a process of its own, which may be killed at any time.
"""
