"""What an agent author imports: environments, their results, and the loop that runs them."""
