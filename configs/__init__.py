"""Recipes: YAML files whose header names the paper, the cost, the expected score and the exact command."""
