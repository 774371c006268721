"""``miles sweep``: variants times seeds as independent runs, a few at once, and their comparison."""
