"""Images that a policy is shown: what they are, and the tokens that stand for them."""
