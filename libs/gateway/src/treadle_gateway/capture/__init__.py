"""What was said in a session, as a tree of the very tokens; pure."""
