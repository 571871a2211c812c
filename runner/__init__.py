"""An MLX runner for Ollama hosts."""
