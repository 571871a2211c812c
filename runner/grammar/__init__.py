"""Structured output: from what a request asks for to the tokens that may come next."""

from runner.grammar.compiler import Compiled, Compiler
from runner.grammar.guide import Guide

__all__ = ["Compiled", "Compiler", "Guide"]
