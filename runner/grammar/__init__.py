"""Structured output: from what a request asks for to the tokens that may come next."""

from runner.grammar.guide import Grammar, Guide
from runner.grammar.messages import CompilerSetup
from runner.grammar.worker_pool import WorkerPool

__all__ = ["CompilerSetup", "Grammar", "Guide", "WorkerPool"]
