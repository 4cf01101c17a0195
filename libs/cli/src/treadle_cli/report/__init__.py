"""A run as one HTML page: curves, deaths, and what the policy said before and after."""
