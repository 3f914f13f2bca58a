"""What watches the steps of a run, whatever is tracked."""
