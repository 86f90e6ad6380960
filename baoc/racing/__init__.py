"""Recipes raced on short paired runs. `verdict` decides from scores alone who leaves a race and what it chooses."""
