"""Makers of tiny models: directories, stores, tokenizers. Importable without pytest."""
