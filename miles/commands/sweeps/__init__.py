"""``miles sweep``: variants times seeds as independent runs, a few at a time, and their comparison."""
