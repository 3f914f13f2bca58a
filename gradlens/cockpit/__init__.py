"""The context around ``loss.backward()``, and what it does at each step."""
