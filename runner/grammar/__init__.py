"""Structured output: from what a request asks for to the tokens that may come next."""

from runner.grammar.guide import Grammar, Guide
from runner.grammar.messages import Setup
from runner.grammar.workers import Workers

__all__ = ["Grammar", "Guide", "Setup", "Workers"]
