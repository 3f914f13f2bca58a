"""Real questions about trainings that fail, re-created with a repaired twin, and healthy loops."""
