"""An MLX runner for Ollama hosts."""

__version__ = "0.1.0"
