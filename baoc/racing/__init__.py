"""Recipes raced on short paired runs. `rules` decides from scores alone who leaves a race and what it chooses."""
