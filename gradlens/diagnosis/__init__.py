"""What is wrong with a run: rules, and the findings that they make; needs numpy alone."""
