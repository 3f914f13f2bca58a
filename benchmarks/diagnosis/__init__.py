"""How often diagnosis names injected faults, and how often it alarms in healthy runs."""
